"""What several tests of text share."""

from chat_support import built as built
