"""Anthropic's API: messages, translated to OpenAI's chats."""
