"""The APIs of OpenAI, Anthropic, Ollama and llama.cpp, and Unspool's own endpoints."""
