"""A side of bench.embed: sentence-transformers on OpenVINO or ONNX Runtime in int8, in a Python of its own.

Its package optimum needs an older transformers than ours, so it has an environment of its own, without this project:
`pip install 'sentence-transformers[openvino,onnx]' nncf datasets`. Each line of input is a JSON object with texts and a
batch size. The answer is the length of an npy file and the file itself, the vectors.
"""

import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
from sentence_transformers import (
    SentenceTransformer,
    export_dynamic_quantized_onnx_model,
    export_static_quantized_openvino_model,
)

FILES = {"openvino": "openvino_model_qint8_quantized.xml", "onnx": "model_qint8_avx512_vnni.onnx"}


def quantized(folder: Path, backend: Literal["openvino", "onnx"], texts: str, work: str) -> SentenceTransformer:
    """Quantise as its documentation does: OpenVINO with a sample of texts (a folder with data sets), ONNX without."""
    model = SentenceTransformer(str(folder), backend=backend, model_kwargs={"export": True})
    model.save_pretrained(work)
    if backend == "onnx":
        export_dynamic_quantized_onnx_model(model, "avx512_vnni", work)
    else:
        export_static_quantized_openvino_model(
            model,
            None,
            work,
            dataset_name=texts,
            dataset_config_name="default",
            dataset_split="train",
            column_name="title",
        )
    return SentenceTransformer(work, backend=backend, model_kwargs={"file_name": FILES[backend]})


def main() -> None:
    folder, texts = sys.argv[1], sys.argv[3]
    backend: Literal["openvino", "onnx"] = "onnx" if sys.argv[2] == "onnx" else "openvino"
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print
    with tempfile.TemporaryDirectory() as work:
        model = quantized(Path(folder), backend, texts, work)
        for line in sys.stdin:
            asked = json.loads(line)
            vectors = model.encode(asked["texts"], batch_size=asked["batch_size"], show_progress_bar=False)
            np.save(file := io.BytesIO(), vectors)
            answers.write(f"{file.tell()}\n".encode() + file.getvalue())
            answers.flush()


if __name__ == "__main__":
    main()
