"""APIs of other servers, one file each: OpenAI, Anthropic, Ollama, llama.cpp, and Unspool's."""
