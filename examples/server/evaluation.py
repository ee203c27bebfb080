"""lm-evaluation-harness on a started server: questions over documents, each document a chunk.

pip install 'lm_eval[api]'
python examples/server/evaluation.py [http://127.0.0.1:8000]

CHUNKATTN_API_KEY is the server's key, if it has one.

lm_eval's own tasks are run by its command. Those that compare given answers need the model's tokenizer too:

MODEL=model=NAME,tokenizer=/path/to/checkpoint,base_url=http://127.0.0.1:8000/v1/completions
lm_eval run --model local-completions --model_args $MODEL --tasks arc_easy
"""

import os
import sys
from pathlib import Path

import lm_eval
import requests
from lm_eval.tasks import TaskManager

TASK = {
    "task": "reading",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path(__file__).with_suffix(".jsonl"))}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "Read the documents and answer the question. # # {{documents | join(' # # ')}} # # {{question}} Answer:",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0, "chunk_aware": True},
    "metric_list": [
        {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "regexes_to_ignore": [r"\s"]},
    ],
}

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
header = {"Authorization": f"Bearer {os.environ.get('CHUNKATTN_API_KEY', 'none')}"}
models = requests.get(f"{url}/v1/models", headers=header, timeout=60)
models.raise_for_status()
results = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": models.json()["data"][0]["id"],
        "base_url": f"{url}/v1/completions",
        "header": header,
        "tokenizer_backend": "None",  # texts are sent; the server has the tokenizer
    },
    tasks=[TASK],
    task_manager=TaskManager(include_defaults=False),
)
for sample in results["samples"]["reading"]:
    print(f"{sample['doc']['question']}{sample['filtered_resps'][0]}  ({sample['target']})")
print(f"exact: {results['results']['reading']['exact_match,none']:.0%}")
