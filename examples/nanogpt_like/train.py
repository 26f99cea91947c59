"""A character-level language model on sonnets, like nanoGPT: ``--name=value`` sets a global, and
``out/ckpt.pt`` is overwritten. It knows nothing of robust-train."""

import math
import sys
from ast import literal_eval
from pathlib import Path

import torch
from torch.nn import functional

out_dir = "out"
init_from = "scratch"  # or resume
batch_size = 16
gradient_accumulation_steps = 2
block_size = 32
width = 32
max_iters = 40
eval_interval = 10
learning_rate = 1e-3
fails_above = 1000  # Not in nanoGPT: larger batches pretend to run out of memory.
for word in sys.argv[1:]:
    name, _, value = word.removeprefix("--").partition("=")
    known = globals()[name]
    globals()[name] = value if isinstance(known, str) else literal_eval(value)

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)
text = (Path(__file__).parents[1] / "transformers_sonnets" / "sonnets.txt").read_bytes()
data = torch.tensor(list(text))


def get_batch():
    starts = torch.randint(len(data) - block_size - 1, (batch_size,))
    pieces = torch.stack([data[i : i + block_size + 1] for i in starts]).to(device)
    return pieces[:, :-1], pieces[:, 1:]


layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
model = torch.nn.ModuleDict(
    {
        "tokens": torch.nn.Embedding(256, width),
        "places": torch.nn.Embedding(block_size, width),
        "blocks": torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "head": torch.nn.Linear(width, 256),
    }
).to(device)
mask = torch.nn.Transformer.generate_square_subsequent_mask(block_size).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(f"{out_dir}/ckpt.pt", map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    print(f"resuming at iteration {iter_num}")

while iter_num < max_iters:
    if iter_num >= 20 and batch_size > fails_above:
        raise torch.OutOfMemoryError("CUDA out of memory. (not really)")
    for _ in range(gradient_accumulation_steps):
        x, y = get_batch()
        places = model["places"](torch.arange(block_size, device=device))
        logits = model["head"](model["blocks"](model["tokens"](x) + places, mask))
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num % eval_interval == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, batch {batch_size}")
        assert math.isfinite(loss.item())
        Path(out_dir).mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "iter_num": iter_num}, f"{out_dir}/ckpt.pt")
