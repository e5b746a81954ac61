"""An outside check: lm-evaluation-harness gives the same log-likelihoods and answers as rope_ext's own evaluations.

    pip install lm-eval
    python benchmarks/lm_eval_check.py [--model smollm2] [--length 2048] [--method yarn] [--factor 2]

Twice: lm-eval given the patched model object, and lm-eval loading the exported checkpoint by path, as a user would. Per
passage the sum of ln p over its tokens. Then two of lm-eval's own RULER tasks, those that need no download (vt and
fwe): its prompts, answered and scored by lm-eval and by rope_ext's reader and score.
"""

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.ruler import fwe_utils, vt_utils
from lm_eval.tasks.ruler.common_utils import process_results

from rope_ext import export, patched
from rope_ext.evals.questions import Question, QuestionTask, encode
from rope_ext.evals.runner import run
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import read_text
from rope_ext.models import load


class Theirs(QuestionTask):
    """Prompts that lm-eval made."""

    name = "theirs"

    def __init__(self, documents: list[dict[str, Any]], length: int, max_new_tokens: int) -> None:
        self.documents, self.length, self.max_new_tokens = documents, length, max_new_tokens

    def settings(self) -> dict[str, Any]:
        return {}

    def rows(self) -> list[dict[str, Any]]:
        return [{"length": self.length, "sample": number} for number in range(len(self.documents))]

    def question(self, tokenizer: Any, row: dict[str, Any]) -> Question:
        document = self.documents[row["sample"]]
        ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt_of(document), add_special_tokens=False)]
        answer = encode(tokenizer, " " + ", ".join(document["outputs"]))
        return Question(ids, tuple(document["outputs"]), answer, self.max_new_tokens)


def prompt_of(document: dict[str, Any]) -> str:
    return f"{document['input']} {document['gen_prefix']}"


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--method", default="yarn")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--samples", type=int, default=3)
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    ids = tokenizer.encode(read_text()[: 16 * given.length * given.samples], add_special_tokens=False, verbose=False)
    span = given.length - 1
    passages = [tokenizer.decode(ids[start : start + span]) for start in range(0, span * given.samples, span)]
    assert all(len(tokenizer.encode(passage, add_special_tokens=False)) == span for passage in passages)
    made = {
        "vt": (vt_utils.sys_vartrack_w_noise_random(tokenizer, given.samples, given.length), 30),
        "fwe": (fwe_utils.sys_kwext(tokenizer, given.length, given.samples), 50),
    }
    with patched(model, given.method, factor=given.factor), tempfile.TemporaryDirectory() as folder:
        ours = [run(Perplexity(passage, [given.length]), model, tokenizer)[0] for passage in passages]
        likelihoods = [-math.log(row["perplexity"]) * row["tokens"] for row in ours]
        scores = {
            name: [row["score"] for row in run(Theirs(documents, given.length, new), model, tokenizer)]
            for name, (documents, new) in made.items()
        }
        print(export(model, Path(folder) / "made", tokenizer).message)
        options = {"batch_size": 1, "max_length": 2 * given.length, "add_bos_token": False, "device": str(model.device)}
        sides = {"patched object": HFLM(pretrained=model, tokenizer=tokenizer, **options)}
        sides["exported folder"] = HFLM(pretrained=str(Path(folder) / "made"), dtype="float32", **options)
        start = tokenizer.bos_token  # lm-eval puts it before a text whose likelihood is asked, not before a prompt
        for name, harness in sides.items():
            rolling = harness.loglikelihood_rolling(requests("loglikelihood_rolling", [(each,) for each in passages]))
            worst = max(abs(one - other) / abs(other) for one, other in zip(rolling, likelihoods, strict=True))
            print(f"{name}: {len(passages)} passages of {span:,} tokens, largest relative difference {worst:.1e}")
            for task, (documents, new) in made.items():
                asked = [
                    (start + prompt_of(each), {"until": [], "max_gen_toks": new, "do_sample": False})
                    for each in documents
                ]
                said = harness.generate_until(requests("generate_until", asked))
                theirs = [
                    process_results(each, [text])[str(given.length)] for each, text in zip(documents, said, strict=True)
                ]
                print(f"{name}: {task}, scores of lm-eval {theirs}, of rope_ext {scores[task]}")
                assert theirs == scores[task]


if __name__ == "__main__":
    main()
