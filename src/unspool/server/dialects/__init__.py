"""The APIs of OpenAI, Anthropic, Ollama and llama.cpp, and Unspool's own endpoints."""

from __future__ import annotations


# -- Anthropic's API: messages, translated to OpenAI's chats


# -- Ollama's API, translated to OpenAI's chats


# -- llama.cpp's own API
