"""Ollama's API, translated to OpenAI's chats."""
