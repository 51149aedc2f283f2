"""End-of-generation tokens (EOG): which tokens end a text or a turn.

A checkpoint names one end token, but a chat model writes others too: end of turn, end of a message
to a tool, end of a file. Their texts are few and known, so they are looked up by text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# No vocabulary uses these as ordinary text, so the token type in the file does not matter.
UNAMBIGUOUS_END_TEXTS = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|endofturn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<｜end▁of▁sentence｜>",
        # separators between files in the training text of code models
        "<|fim_pad|>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<|file_sep|>",
    ]
)

# These also occur as ordinary text (</s> is a tag of HTML), so only a control token counts.
CONTROL_END_TEXTS = frozenset(
    ["</s>", "<eos>", "<EOT>", "_<EOT>", "▁<EOT>", "[EOT]", "[EOS]", "<|tool_response>",
     "<fim-pad>", "<fim_pad>", "<fim-repo>", "<REPO>", "<reponame>"]
)  # fmt: skip


def end_ids(tokens: Mapping[str, int], control: Collection[int]) -> set[int]:
    """Return the ids in `tokens` (text to id) that end a text; `control` are the control tokens."""
    ends = {tokens[text] for text in UNAMBIGUOUS_END_TEXTS if text in tokens}
    ends |= {
        tokens[text] for text in CONTROL_END_TEXTS if text in tokens and tokens[text] in control
    }
    # In these two formats <|end|> ends one message of an answer, and another may follow.
    harmony = {"<|return|>", "<|call|>"} <= tokens.keys()
    solar = {"<|calls|>", "<|flush|>"} <= tokens.keys()
    if harmony or solar:
        ends.discard(tokens.get("<|end|>", -1))
    if "<|tool_response>" in tokens:
        ends.discard(tokens.get("</s>", -1))
    return ends
