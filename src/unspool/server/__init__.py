"""The HTTP server: the APIs of OpenAI, Anthropic, Ollama and llama.cpp, and the token tree."""
