"""A process in which transformers and sentence-transformers answer, a line of JSON for a line of JSON.

They take ten seconds to import, so one process serves all tests, and starts while the first of them still works.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
ENV = {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Peers:
    """The caller's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENV
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def make(self, path: Path, *, pooling: str, max_tokens: int, lowercase: bool) -> None:
        """A random BERT saved by transformers, with the tokenizer.json that lies at `path`."""
        self._ask(do="make", path=str(path), pooling=pooling, max_tokens=max_tokens, lowercase=lowercase)

    def sentence_vectors(self, path: Path, texts: list[str]) -> Vectors:
        return np.array(self._ask(do="sentence", path=str(path), texts=texts), dtype=np.float32)

    def mean_states(self, path: Path, texts: list[str]) -> Vectors:
        """Of AutoModel with AutoTokenizer: the mean over real tokens, scaled to length one."""
        return np.array(self._ask(do="transformers", path=str(path), texts=texts), dtype=np.float32)

    def _ask(self, **words: Any) -> Any:
        pipe = self._process
        assert pipe.stdin is not None and pipe.stdout is not None
        pipe.stdin.write(json.dumps(words) + "\n")
        pipe.stdin.flush()
        line = pipe.stdout.readline()
        assert line, f"the process with the other libraries ended with {pipe.wait(30)}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)

    def sentence(words: dict[str, Any]) -> Any:
        model = SentenceTransformer(words["path"], device="cpu", local_files_only=True)
        return model.encode(words["texts"], batch_size=4, show_progress_bar=False).tolist()

    def states(words: dict[str, Any]) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(words["path"])
        model = transformers.AutoModel.from_pretrained(words["path"]).eval()
        batch = tokenizer(words["texts"], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(mean).tolist()

    def make(words: dict[str, Any]) -> Any:
        folder = Path(words["path"])
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        torch.manual_seed(11)
        config = transformers.BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=40,
        )
        bert = transformers.BertModel(config)
        with torch.no_grad():
            for parameter in bert.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        bert.save_pretrained(folder)
        special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
        settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": words["lowercase"], "model_max_length": 512}
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **special}))
        from sentence_transformers.sentence_transformer import modules

        encoder = modules.Transformer(str(folder), max_seq_length=words["max_tokens"])
        pooling = modules.Pooling(encoder.get_embedding_dimension(), pooling_mode=words["pooling"])
        SentenceTransformer(modules=[encoder, pooling, modules.Normalize()], device="cpu").save(str(folder))

    calls = {"sentence": sentence, "transformers": states, "make": make}
    for line in sys.stdin:
        words = json.loads(line)
        try:
            answer = {"result": calls[words["do"]](words)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
