import hashlib
import json
import shutil
from pathlib import Path


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


class Registry:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def add(self, folder: Path) -> str:
        version = digest(folder)
        if not (self.root / version).exists():
            shutil.copytree(folder, self.root / version)
        return version

    def open(self, version: str) -> Path:
        if digest(self.root / version) != version:
            raise ValueError(version)
        return self.root / version

    def _moves(self, alias: str) -> list[dict]:
        path = self.root / f"{alias}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def promote(self, alias: str, version: str, loss: float, min_gain: float = 0.0) -> bool:
        moves = self._moves(alias)
        if moves and moves[-1]["loss"] - loss < min_gain:
            return False
        with (self.root / f"{alias}.jsonl").open("a") as file:
            file.write(json.dumps({"version": version, "loss": loss}) + "\n")
        return True

    def current(self, alias: str) -> str:
        moves = self._moves(alias)
        if not moves:
            raise KeyError(alias)
        return moves[-1]["version"]

    def history(self, alias: str) -> list[str]:
        return [one["version"] for one in self._moves(alias)]
