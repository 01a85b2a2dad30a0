"""Chat templates by name, for tokenizers that come without one or with another one.

Each writes what the models of a family were trained on: the tokens around a turn and the names of
the roles. A template is only taken for a tokenizer that has the token which ends its turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fluxtrain.errors import BadInput
from fluxtrain.files.opening import read_plain

AUTO = "auto"
TEMPLATE_LIMIT_BYTES = 1 << 20

_CALLS = (
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>\n{\"name\": ' + (c['function']['name'] | "
    "tojson) + ', \"arguments\": ' + (c['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
_TOOLS = (
    "{% if tools %}{{ '# Tools\n\nFunctions that may be called, one a line:\n<tools>\n' }}"
    "{% for t in tools %}{{ (t | tojson) + '\n' }}{% endfor %}{{ '</tools>\n\nA call is written as "
    '\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>\' }}{% endif %}'
)
_OTHER_ROLES = "{{ raise_exception('this template has no role ' + m['role']) }}"


def _headed(begin: str, behind: str, end: str, tool: str, before: str = "") -> str:
    """Write a template whose turns have a header with the role, and `end`, an expression."""
    system = (
        "{% if messages[0]['role'] in ('system', 'developer') %}{{ messages[0]['content'] }}"
        "{% if tools %}{{ '\n\n' }}{% endif %}{% endif %}"
    )
    opened = f"{{% if tools or messages[0]['role'] in ('system', 'developer') %}}{{{{ {begin!r} + "
    opened += f"'system' + {behind!r} }}}}{system}{_TOOLS}{{{{ {end} }}}}{{% endif %}}"
    turn = f"{{{{ {begin!r} + role + {behind!r} + (m['content'] or '') }}}}"
    turn += f"{{% if m['tool_calls'] and m['content'] %}}{{{{ '\n' }}}}{{% endif %}}{_CALLS}"
    return (
        f"{before}{opened}{{% for m in messages %}}"
        "{% if not (loop.first and m['role'] in ('system', 'developer')) %}"
        f"{{% set role = {tool!r} if m['role'] == 'tool' else m['role'] %}}"
        f"{turn}{{{{ {end} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {begin!r} + 'assistant' + {behind!r} }}}}"
        "{% endif %}"
    )


_BOS = "{{ bos_token }}"
_CHATML = _headed("<|im_start|>", "\n", "'<|im_end|>\n'", "tool")
_INSTRUCTED = (
    # the system's words stand in front of the first question
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] in ('system', 'developer') %}{% set ns.system = m['content'] + '\n\n' %}"
    "{% elif m['role'] == 'user' %}{{ USER }}{% set ns.system = '' %}"
    "{% elif m['role'] == 'assistant' %}{{ ASSISTANT }}"
    "{% else %}" + _OTHER_ROLES + "{% endif %}{% endfor %}"
)


def _instructed(user: str, assistant: str) -> str:
    return _BOS + _INSTRUCTED.replace("USER", user).replace("ASSISTANT", assistant)


@dataclass(frozen=True, slots=True)
class Template:
    """A template, and the token that ends its turns; None: the tokenizer's end of sequence."""

    template: str
    end: str | None


NAMED: dict[str, Template] = {
    "chatml": Template(_CHATML, "<|im_end|>"),
    "qwen-2.5": Template(_headed("<|im_start|>", "\n", "'<|im_end|>\n'", "user"), "<|im_end|>"),
    "llama-2": Template(
        _instructed(
            "'[INST] ' + ('<<SYS>>\n' + ns.system | trim + '\n<</SYS>>\n\n' if ns.system else '')"
            " + m['content'] + ' [/INST]'",
            "' ' + m['content'] + ' ' + eos_token",
        ),
        None,
    ),
    "llama-3": Template(
        _headed("<|start_header_id|>", "<|end_header_id|>\n\n", "'<|eot_id|>'", "ipython", _BOS),
        "<|eot_id|>",
    ),
    "mistral": Template(
        _instructed(
            "'[INST] ' + ns.system + m['content'] + ' [/INST]'",
            "' ' + m['content'] + eos_token",
        ),
        None,
    ),
    "gemma": Template(
        _instructed(
            "'<start_of_turn>user\n' + ns.system + m['content'] + '<end_of_turn>\n'",
            "'<start_of_turn>model\n' + m['content'] + '<end_of_turn>\n'",
        )
        + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
    ),
    "phi-3": Template(_headed("<|", "|>\n", "'<|end|>\n'", "user"), "<|end|>"),
    "phi-4": Template(_headed("<|im_start|>", "<|im_sep|>", "'<|im_end|>'", "user"), "<|im_end|>"),
    "zephyr": Template(_headed("<|", "|>\n", "eos_token + '\n'", "user"), None),
}  # fmt: skip


class NamingTokenizer(Protocol):
    """The part of a tokenizer that a template is chosen for."""

    chat_template: Any
    eos_token: Any

    def get_vocab(self) -> dict[str, int]: ...


def use_template(tokenizer: NamingTokenizer, chosen: str) -> None:
    """Give `tokenizer` the template that `data.chat_template` names; it is saved with it.

    Raises BadInput for an unknown name, a file that cannot be read, and a tokenizer that lacks the
    token with which the template ends turns.
    """
    if chosen == AUTO:
        return
    if chosen.endswith(".jinja"):
        tokenizer.chat_template = _from_file(Path(chosen).expanduser())
        return
    if chosen not in NAMED:
        raise BadInput(
            f"data.chat_template {chosen!r} is not auto, {', '.join(NAMED)}, or the path of a "
            ".jinja file"
        )
    named = NAMED[chosen]
    end = named.end or tokenizer.eos_token
    vocabulary = tokenizer.get_vocab()
    if end is None or end not in vocabulary:
        wanted = end or "the tokenizer's end of sequence, which is not set"
        others = templates_for(tokenizer)
        raise BadInput(
            f"data.chat_template = {chosen} ends turns with {wanted}, which is no token of this "
            f"tokenizer, so the model could not learn to stop: choose {' or '.join(others) or 'a'}"
            f"{'' if others else ' .jinja file'}, or add the token to the tokenizer and the model"
        )
    tokenizer.chat_template = named.template


def templates_for(tokenizer: NamingTokenizer) -> list[str]:
    """Return the names of the templates whose turns `tokenizer` has a token to end."""
    vocabulary = tokenizer.get_vocab()
    return [name for name, one in NAMED.items() if (one.end or tokenizer.eos_token) in vocabulary]


def _from_file(path: Path) -> str:
    try:
        text = read_plain(path, TEMPLATE_LIMIT_BYTES, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"data.chat_template {path} cannot be read: {error}") from error
    if not text.strip():
        raise BadInput(f"data.chat_template {path} is empty")
    return text
