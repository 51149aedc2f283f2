"""Which tokens end a text or a turn.

A checkpoint names one end token, but a chat model writes others too: the end of a turn, of a
message to a tool, of a file. Their texts are few and known, so they are looked up by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# No vocabulary uses these as ordinary text, whatever kind of token the file says they are.
CLEAR_END_TEXTS = frozenset(
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
        # what stands between the files of a code model's training text
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
    """The ids among `tokens` (text to id) that end a text; `control` says which are control."""
    ends = {tokens[text] for text in CLEAR_END_TEXTS if text in tokens}
    ends |= {
        tokens[text] for text in CONTROL_END_TEXTS if text in tokens and tokens[text] in control
    }
    # In these two dialects <|end|> closes a part of an answer, and more of it follows.
    harmony = {"<|return|>", "<|call|>"} <= tokens.keys()
    solar = {"<|calls|>", "<|flush|>"} <= tokens.keys()
    if harmony or solar:
        ends.discard(tokens.get("<|end|>", -1))
    if "<|tool_response>" in tokens:
        ends.discard(tokens.get("</s>", -1))
    return ends
