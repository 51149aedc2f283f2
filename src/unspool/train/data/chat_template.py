"""Default chat template of a new tokenizer: ChatML, with tool calls as in Hermes and Qwen.

The `{% generation %}` tags enclose the assistant's text and its end of turn: they define the loss
mask (transformers reads the same tags).
"""

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif -%}
You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>

A call is written like this:
<tool_call>
{"name": "the function", "arguments": {"name": "value"}}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{% generation %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call %}{% if not loop.first or message.content %}
{% endif -%}
<tool_call>
{"name": {{ function.name | tojson }}, "arguments": \
{{ function.arguments if function.arguments is string else function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}{{ '\\n' }}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>{{ '\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
