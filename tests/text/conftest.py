"""What several tests of text share."""

from helpers.chat_support import built as built
