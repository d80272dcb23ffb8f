"""The engine as a model of EleutherAI's lm-eval: what its tasks ask of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pykernels.errors import PykernelsError
from runtime.engine import RequestHandle, SamplingParams

from ..llm import LLM
from .likelihood import Likelihood, Pair, likelihoods
from .progress import Progress

MAX_NEW_TOKENS = 256
"""The limit of an answer whose task sets none, as in lm-eval's own models."""


class EngineLM(TemplateLM):
    """``lm_eval.simple_evaluate(model=EngineLM(llm), ...)``.

    Args:
        llm: with a tokenizer; with many rows (``likelihood.ROWS``) it scores faster.
        in_turn: begin an answer when the one before has ended.
    """

    def __init__(
        self,
        llm: LLM,
        progress: Progress = lambda what, total: lambda count: None,
        in_turn: bool = False,
    ) -> None:
        super().__init__()
        if llm.tokenizer is None:
            raise PykernelsError("this model has no tokenizer", "Use a checkpoint with one")
        self.llm, self.tokenizer, self._progress = llm, llm.tokenizer, progress
        self._in_turn = in_turn

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that begins with nothing."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.llm.runner.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        bos = self.tokenizer.bos_token
        add = not (bos and string.startswith(bos))
        add = add if add_special_tokens is None else add_special_tokens
        ids: list[int] = self.tokenizer(string, add_special_tokens=add, verbose=False)["input_ids"]
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = self._score([(context, continuation) for _, context, continuation in requests])
        return [(one.logprob, one.greedy) for one in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        scores = iter(self._score([pair for each in windows for pair in each]))
        return [sum(next(scores).logprob for _ in each) for each in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        done = self._progress("writing", len(requests))
        handles: list[RequestHandle] = []
        texts: list[str] = []

        def take() -> None:
            texts.append(handles[len(texts)].result().text)
            done(1)

        try:
            for request in requests:
                context, how = request.args
                params = _params(how)
                assert params.max_tokens is not None
                longest = self.max_length - params.max_tokens
                handles.append(self.llm.engine.submit(self.tok_encode(context)[-longest:], params))
                if self._in_turn:
                    take()
            while len(texts) < len(handles):
                take()
            return texts
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def _score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        return likelihoods(self.llm, pairs, self._progress("scoring", len(pairs)))


def _params(how: dict[str, Any]) -> SamplingParams:
    """Parameters from a task's ``generation_kwargs`` (transformers' names) and ``until``."""
    left = dict(how)
    until = left.pop("until", None) or ()
    limits = [left.pop(name, None) for name in ("max_gen_toks", "max_new_tokens")]
    drawn = bool(left.pop("do_sample", False))
    temperature = float(left.pop("temperature", 1.0) or 0.0)
    chosen = {name: left.pop(name) for name in ("top_k", "top_p", "min_p") if name in left}
    if left:
        raise PykernelsError(
            f"the engine does not generate with {', '.join(left)}", "Change generation_kwargs"
        )
    return SamplingParams(
        temperature=temperature if drawn else 0,
        max_tokens=next((limit for limit in limits if limit), MAX_NEW_TOKENS),
        stop=until,
        seed=0,
        **(chosen if drawn else {}),
    )
