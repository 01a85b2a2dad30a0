"""The demo's text, docstrings of this Python's standard library, and a tokenizer trained on it.

Both are made once and kept in the user's cache as ordinary files (a .jsonl with `text`, a
tokenizer folder), so all later code treats them like a user's data.
"""

from __future__ import annotations

import ast
import errno
import inspect
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.files.cache import cache_root
from fluxtrain.files.folders import finish, unfinished_folder
from fluxtrain.files.opening import is_plain_folder
from fluxtrain.files.temporary import FULL, free_text, temporary_error
from fluxtrain.units import bytes_text

VOCABULARY = 2048
CORPUS_LIMIT_BYTES = 4 << 20
SIZE_BYTES = 3 << 20  # of the files of any Python's library so far
SHORTEST_DOCSTRING = 40  # characters: below that it is mostly a repeated name
PROMPT = "Return the "
END_OF_TEXT = "<|endoftext|>"
RECIPE = 4  # raise it when corpus or tokenizer would change

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")  # in the order of syntax trees


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFiles:
    """Where the demo's corpus and tokenizer lie."""

    corpus: Path  # .jsonl with `text`, a docstring a line
    tokenizer: Path  # a folder that AutoTokenizer loads
    documents: int


def demo_files(cache: Path | None = None) -> DemoFiles:
    """Return the demo's files, made on first use (a few seconds on one core).

    `cache` defaults to $XDG_CACHE_HOME/fluxtrain or ~/.cache/fluxtrain, and to the temporary
    directory when that cannot be written. Raises BadInput when the interpreter comes without the
    source of its library, NoSpace on a full disk.
    """
    name = f"demo-{platform.python_implementation()}-{platform.python_version()}-{RECIPE}".lower()
    folder = _writable(cache) / name
    if not _whole(folder):
        _make_anew(folder)
    corpus = folder / "corpus.jsonl"
    with corpus.open("rb") as file:
        count = sum(1 for _ in file)
    return DemoFiles(corpus=corpus, tokenizer=folder, documents=count)


def docstrings(library: Path | None = None) -> Iterator[str]:
    """Yield distinct docstrings of modules below `library` (default: this Python's), by path.

    Files are parsed, never imported; files that do not parse (some are bad on purpose) are skipped.
    """
    root = library or Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if not _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in _statements(tree):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            if not text or len(text) < SHORTEST_DOCSTRING:
                continue
            words = " ".join(text.split()).casefold()  # as repeats are counted in all data
            if words not in seen:
                seen.add(words)
                yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield statements in the order of `ast.walk`, which visits ten times as many nodes:
    expressions hold no docstring."""
    waiting = deque[ast.AST]([tree])
    while waiting:
        node = waiting.popleft()
        for name in _BODIES:
            waiting.extend(getattr(node, name, ()))
        yield node


def train_tokenizer(texts: list[str], folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Train a byte-level BPE on `texts` and write it to `folder` in Hugging Face format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, bos_token=None
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _whole(folder: Path) -> bool:
    """Return whether the tokenizer's files exist and are not truncated, as after a power cut."""
    try:
        for name in ("tokenizer_config.json", "tokenizer.json"):
            json.loads((folder / name).read_bytes())
        with (folder / "corpus.jsonl").open("rb") as file:
            file.seek(-2, os.SEEK_END)
            return file.read() == b"}\n"
    except (OSError, ValueError):
        return False


def _make_anew(folder: Path) -> None:
    """Make the files, which appear all at once. Raises NoSpace."""
    try:
        free = shutil.disk_usage(folder.parent).free
        if free < SIZE_BYTES:  # known before the seconds of making
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        shutil.rmtree(folder, ignore_errors=True)
        with unfinished_folder(folder.parent, ".demo-") as made:
            texts = _corpus()
            with (made / "corpus.jsonl").open("w", encoding="utf-8") as file:
                lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
                file.writelines(f"{line}\n" for line in lines)
            train_tokenizer(texts, made)
            finish(made)
            try:
                made.rename(folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # otherwise another process made the same files meanwhile
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise NoSpace(
            f"no space left for the demo's text in {folder.parent} ({error.strerror}; "
            f"{bytes_text(SIZE_BYTES)} needed, {free_text(folder.parent)} free): make room, or set "
            f"{_moved_by(folder.parent)} to a folder on another disk"
        ) from error


def _corpus() -> list[str]:
    texts: list[str] = []
    size_bytes = 0
    for text in docstrings():
        size_bytes += len(text.encode("utf-8", "replace"))
        if size_bytes > CORPUS_LIMIT_BYTES:
            break
        texts.append(inspect.cleandoc(text).encode("utf-8", "replace").decode("utf-8"))
    if len(texts) < 1000:
        raise BadInput(
            f"this Python ({sys.executable}) comes without the source of its library "
            f"({len(texts)} docstrings found): use another Python, or name your own text in "
            "data.path"
        )
    return texts


def _writable(cache: Path | None) -> Path:
    chosen = cache or cache_root()
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        if os.access(chosen, os.W_OK):
            return chosen
    except OSError as error:
        if cache is not None:
            raise BadInput(f"{cache} cannot be written: {error.strerror}") from error
    return _temporary()


def _temporary() -> Path:
    """Return the folder for the demo in the temporary directory, which must be this user's."""
    try:
        folder = Path(tempfile.gettempdir()) / f"fluxtrain-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise temporary_error(error, "the demo's text") from error
    if not is_plain_folder(folder) or folder.lstat().st_uid != os.getuid():
        raise BadInput(
            f"{folder} is not a folder of yours: remove it, or set XDG_CACHE_HOME to a folder that "
            "can be written"
        )
    return folder


def _moved_by(folder: Path) -> str:
    """Return the variable that moves the folder of the demo."""
    return "TMPDIR" if folder.name == f"fluxtrain-{os.getuid()}" else "XDG_CACHE_HOME"
