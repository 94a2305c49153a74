"""Train an EAGLE-3 draft for the demo's model, all steps in one call, and decode speculatively.

    python examples/draft_model.py    # three minutes; the first run trains runs/demo/sft/model

B texts of T tokens, S unrolled steps of the draft, H hidden width. A *row* is the hidden state of
one token in the verifier, the trained model whose tokens the draft predicts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

import headloss as hl
from headloss import train
from headloss.train.model import load as load_model
from headloss.train.task import load as load_task

Past = list[tuple[Tensor, Tensor]]  # Attention keys and values, by unrolled step.
END = 1  # The id of the demo's end-of-answer token.


class Draft(nn.Module):
    """A layer that reads verifier states and the next token, as in EAGLE-3 (arXiv:2503.01840)."""

    def __init__(self, width: int, heads: int = 4, longest: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.fuse = nn.Linear(3 * width, width, bias=False)
        self.places = nn.Embedding(longest, width)
        self.qkv = nn.Linear(2 * width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def step(self, hidden: Tensor, tokens: Tensor, first: int, past: Past) -> Tensor:
        """Return the draft's next states [B, T, H] and append the step's keys and values to `past`.

        In the first unrolled step, `hidden` [B, T, H] holds the verifier's states of three layers,
        combined by `fuse` into one vector per token; in later steps it holds the states that the
        previous call returned. `tokens` [B, T, H] holds the embeddings of the drafted or given
        tokens. In every unrolled step, position i of `hidden` and of `tokens` belongs to draft i,
        which starts from the verifier's states at text position i. Draft i attends to the states of
        the first unrolled step at text positions 0 to i, and to its own states of later unrolled
        steps. Draft i does not attend to later states of other drafts, because decoding runs only
        one draft.
        """
        places = self.places.weight[first : first + tokens.shape[1]]
        parts = [rms_norm(x, x.shape[-1:]) for x in (tokens + places, hidden)]
        q, k, v = (self.apart(x) for x in self.qkv(torch.cat(parts, -1)).chunk(3, -1))
        past.append((k, v))
        (keys, values), *later = past
        count = keys.shape[2]
        causal = torch.ones(count, count, dtype=torch.bool).tril()[count - q.shape[2] :]
        scores = (q @ keys.mT).masked_fill(~causal, -torch.inf)
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in later]
        shares = (torch.cat([scores, *own], -1) / q.shape[-1] ** 0.5).softmax(-1)
        seen = shares[..., :count] @ values
        for i, (_, values) in enumerate(later):
            seen = seen + shares[..., count + i, None] * values
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.down(silu(self.up(rms_norm(hidden, hidden.shape[-1:]))))

    def apart(self, x: Tensor) -> Tensor:
        """[B, T, H] to [B, heads, T, H / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Verifier:
    """The frozen trained model, with a head of only the ids in the draft's vocabulary."""

    def __init__(self, model: Any, vocabulary: Tensor) -> None:
        self.model, self.vocabulary = model.eval().requires_grad_(False), vocabulary
        self.embed = model.get_input_embeddings()
        self.head = hl.Head(model.lm_head.weight[vocabulary])

    @torch.no_grad()
    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [B, T, 3 H] of three layers for the draft, and [B, T, H] for the head."""
        layers = self.model.model(ids, output_hidden_states=True).hidden_states
        return torch.cat([layers[0], layers[len(layers) // 2], layers[-1]], -1), layers[-1]


def unrolled(draft: Draft, layers: Tensor, tokens: Tensor, steps: int) -> Tensor:
    """Return the draft's states [B, T, S, H] for each row and unrolled step.

    `layers` [B, T, 3 H] are verifier states, and `tokens` [B, T, H] are embeddings. In unrolled
    step s, the draft that starts from row i reads the token of row i + 1 + s, and stores its new
    state in row i + 1 + s of the result. The state of row r at unrolled step s is zero if no draft
    starts from row r - 1 - s.
    """
    count, past, drafted = layers.shape[1] - steps, Past(), []
    hidden = draft.fuse(layers[:, :count])
    for step in range(steps):
        hidden = draft.step(hidden, tokens[:, step + 1 : step + 1 + count], step, past)
        drafted.append(nn.functional.pad(hidden, (0, 0, step + 1, steps - step - 1)))
    return torch.stack(drafted, 2)


def loss(draft: Draft, verifier: Verifier, ids: Tensor, scored: Tensor, steps: int) -> hl.Output:
    """Return the loss of S unrolled steps, over the rows in the mask `scored` [B, T]."""
    layers, states = verifier.states(ids)
    drafted = unrolled(draft, layers, verifier.embed(ids), steps)
    row, step = torch.arange(ids.shape[1])[:, None], torch.arange(steps)
    # [T, S]: True where row and step have a drafted state.
    there = (row > step) & (row <= step + ids.shape[1] - steps)
    likeliest = hl.head_topk(states, verifier.head, 1).ids  # Ids [B, T, 1].
    batch = hl.Batch(
        torch.where(scored[..., None] & there, likeliest, -100),
        teacher_hidden=states.flatten(0, 1),
        # The S unrolled steps at one text position are adjacent tokens with one teacher row, so
        # that the verifier's head computes the logits of each text position only once.
        teacher_index=torch.arange(ids.numel()).view(*ids.shape, 1).expand(-1, -1, steps),
        step_weights=(0.8**step).expand(*ids.shape, -1),
    )
    objective = hl.lk_hybrid(teacher_head=verifier.head).weighted("step_weights")
    return hl.head_loss(drafted, verifier.head, batch, objective)


@torch.no_grad()
def propose(draft: Draft, verifier: Verifier, layers: Tensor, ids: Tensor, count: int) -> Any:
    """Draft `count` tokens; return their ids [count], and the distributions [count, V] from which
    each id was drawn.

    The draft continues the text `ids` [T + 1]. `layers` holds the verifier's states of the first T
    ids of the text.
    """
    hidden, tokens, past = draft.fuse(layers), ids[1:], Past()
    drafted, distributions = [], []
    for step in range(count):
        first = len(ids) - 1 - len(tokens) + step
        hidden = draft.step(hidden, verifier.embed(tokens)[None], first, past)[:, -1:]
        p = (hidden[0, 0] @ verifier.head.weight.T).softmax(-1)
        distributions.append(torch.zeros(len(verifier.embed.weight)))
        distributions[-1][verifier.vocabulary] = p
        tokens = distributions[-1].multinomial(1)
        drafted.append(tokens)
    return torch.cat(drafted), torch.stack(distributions)


def accept(drafted: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return the accepted prefix of the drafted tokens [S], followed by one token of the verifier.

    p [S, V] and q [S + 1, V] are the distributions of draft and verifier. The returned tokens are
    distributed as samples from q (speculative sampling).
    """
    for i, token in enumerate(drafted):
        if torch.rand(()) * p[i, token] >= q[i, token]:
            instead = (q[i] - p[i]).clamp_min(0).multinomial(1)
            return torch.cat([drafted[:i], instead])
    return torch.cat([drafted, q[-1].multinomial(1)])


def accepted_length(
    draft: Draft, verifier: Verifier, prompts: list[Tensor], count: int
) -> tuple[float, float]:
    """Return the mean number of tokens that one pass of the verifier yields, with the model
    `draft` and with a draft whose tokens the verifier always accepts.

    An answer stops at its end token or after about 12 tokens. Because the answer may end early,
    the last verifier pass may yield fewer tokens than were drafted, even if the verifier accepts
    all drafted tokens.
    """
    tokens = passes = least = 0
    for prompt in prompts:
        layers, states = verifier.states(prompt[None])
        q = (states[0, -1] @ verifier.model.lm_head.weight.T).softmax(-1)
        # The verifier draws the first token without a draft.
        ids = torch.cat([prompt, q.multinomial(1)])
        while ids[-1] != END and len(ids) < len(prompt) + 12:
            drafted, p = propose(draft, verifier, layers, ids, count)
            layers, states = verifier.states(torch.cat([ids, drafted])[None])
            q = (states[0, len(ids) - 1 :] @ verifier.model.lm_head.weight.T).softmax(-1)
            new = accept(drafted, p, q)
            if END in new:
                new = new[: new.tolist().index(END) + 1]
            ids = torch.cat([ids, new])
            layers = layers[:, : len(ids) - 1]
            passes += 1
        answer = len(ids) - len(prompt) - 1
        tokens += answer
        least += -(-answer // (count + 1))
    return tokens / max(1, passes), tokens / max(1, least)


def texts(recipe: train.Recipe, tokenizer: Any) -> tuple[list[Tensor], list[int], list[Tensor]]:
    """Return the ids of training texts, the lengths of their prompts, and held-out prompts."""
    task = load_task(recipe, chat=False)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in task.train]
    answers = [tokenizer(task.completion(row))["input_ids"] for row in task.train]
    whole = [torch.tensor([*p, *a, END]) for p, a in zip(prompts, answers, strict=True)]
    held_out = [torch.tensor(tokenizer(row["prompt"])["input_ids"]) for row in task.held_out]
    return whole, [len(p) for p in prompts], held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("runs/demo/sft/model"))
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--unrolled", type=int, default=4, help="steps that are drafted")
    parser.add_argument("--prompts", type=int, default=64, help="held out, that are answered")
    options = parser.parse_args()
    if not options.model.exists():
        train.run(train.recipe("sft", [f"output={options.model.parent}"]))
    recipe = train.recipe("sft", [f"model={options.model}"])
    model, tokenizer = load_model(recipe)
    whole, prompts, held_out = texts(recipe, tokenizer)
    verifier = Verifier(model, torch.cat(whole).unique())
    torch.manual_seed(0)
    draft = Draft(model.config.hidden_size)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, options.steps + 1)
    answered = held_out[: options.prompts], options.unrolled
    before, _ = accepted_length(draft, verifier, *answered)
    print(f"before: {before:.2f} tokens a pass of the verifier")
    for step in range(options.steps):
        chosen = torch.randint(len(whole), (64,)).tolist()
        ids = nn.utils.rnn.pad_sequence([whole[i] for i in chosen], batch_first=True)
        place = torch.arange(ids.shape[1])
        bounds = torch.tensor([(prompts[i] - 1, len(whole[i]) - 1) for i in chosen])
        scored = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
        out = loss(draft, verifier, ids, scored, options.unrolled)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, options.steps // 8) == 0 or step == options.steps - 1:
            acceptance = out.metrics["lk_hybrid/acceptance"]
            print(f"step {step}: loss {out.loss.item():.3f}, acceptance {float(acceptance):.3f}")
    after, most = accepted_length(draft, verifier, *answered)
    print(f"after: {after:.2f} tokens a pass; all drafts accepted: {most:.2f}")


if __name__ == "__main__":
    main()
