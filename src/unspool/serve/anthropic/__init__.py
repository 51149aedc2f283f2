"""Anthropic's API: messages, by way of OpenAI's chats."""
