"""The server: OpenAI's API, Anthropic's messages, and the tree of tokens, over HTTP."""
