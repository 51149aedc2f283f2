"""llama.cpp's own API, over the same core."""
