"""OpenAI's API: chats, completions, responses, embeddings, models."""
