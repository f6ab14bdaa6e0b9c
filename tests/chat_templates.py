"""Chat templates of our own with the traits of well-known ones, over the special tokens of conftest's tokenizer."""

BODY = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = "{% for message in messages %}" + BODY + "{% endfor %}" + PROMPT
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}" + BODY + "{% endif %}{% endfor %}" + PROMPT
)
MARKED_WITH_NEWLINE = MARKED.replace(
    "'<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "'<|im_end|>\n' }}{% endgeneration %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
STRIPS_THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
)
TRIMS = PLAIN.replace("message['content']", "message['content'] | trim")
ALTERNATES = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}" + BODY + "{% endfor %}" + PROMPT
)
DATED = "{{ 'Today: ' + strftime_now('%d %B %Y') + '\n' }}" + PLAIN
NO_END = PLAIN.replace("<|im_end|>\n", "\n")
PROMPT_ENDS_IN_SPACE = PLAIN.replace("message['role'] + '\n'", "message['role'] + ': '").replace(
    "assistant\n", "assistant: "
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message.get('tool_calls', []) %}{{ '<call>' + call.function.name + ' ' }}"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{{ '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + PROMPT
)

# Thinking as Qwen3's: reasoning from its field or from tags, rendered in what comes after the last question, left out
# before it; enable_thinking=false puts empty tags into the prompt.
REASONS = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# Thinking left out everywhere, the last answer too, while the prompt opens it.
OPENS_THINKING = STRIPS_THINKING.replace(" and not loop.last", "").replace(
    "assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"
)

# Messages in channels as gpt-oss's: reasoning is a message of its own, the last answer ends with another token than
# earlier ones, the system prompt becomes the developer's, and there is a date.
CHANNELS = """\
{{- '<|im_start|>system\\nThe current date: ' + strftime_now('%Y-%m-%d') + '<|im_end|>' }}
{%- for message in messages %}
    {%- if message.role in ('system', 'developer') %}
        {%- if not loop.first %}{{ raise_exception('instructions come first') }}{% endif %}
        {{- '<|im_start|>developer\\n# Instructions\\n\\n' + message.content + '<|im_end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking and loop.last %}
            {{- '<|im_start|>assistant analysis\\n' + message.thinking + '<|im_end|>' }}
        {%- endif %}
        {{- '<|im_start|>assistant final\\n' + message.content }}
        {{- '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>' }}
    {%- else %}{{ raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""

# Instructions in brackets as Mistral's: no generation prompt, the system prompt inside the last question, and errors
# for roles that don't alternate.
BRACKETS = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if system and loop.index0 >= turns | length - 2 else '') }}
        {{- message.content + ' [/INST]' }}
    {%- else %}{{ ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

# Roles of another name, content trimmed and no system prompt, as Gemma's.
NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"""

# Content read as parts only, as of some multimodal models: a text would be taken letter by letter, and left out.
PARTS_ONLY = PLAIN.replace(
    "'\n' + message['content'] + '<|im_end|>\n' }}",
    "'\n' }}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}",
)
