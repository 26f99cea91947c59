"""A detector of a square in a picture, trained by a command like YOLO's: ``batch=16 project=runs``.

``nbs`` is the nominal batch: gradients of ``nbs / batch`` batches are added up before a step. After
each epoch there is ``project/name/weights/last.pt``. It knows nothing of robust-train.
"""

import sys
from pathlib import Path

import torch

args = {
    "batch": "16",
    "nbs": "64",
    "epochs": "3",
    "imgsz": "32",
    "project": "runs",
    "name": "train",
    "resume": "",
    "fails_above": "1000",  # Not in YOLO: larger batches pretend to run out of memory.
}
args.update(word.split("=", 1) for word in sys.argv[1:])
batch, nbs, size = int(args["batch"]), int(args["nbs"]), int(args["imgsz"])

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, 2, 1),
    torch.nn.SiLU(),
    torch.nn.Conv2d(8, 16, 3, 2, 1),
    torch.nn.SiLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(size * size, 2),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
epoch, weights = 0, Path(args["project"], args["name"], "weights")
if args["resume"]:
    state = torch.load(args["resume"], map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epoch = state["epoch"]
    print(f"resuming {args['resume']} after epoch {epoch}")

accumulate = max(round(nbs / batch), 1)
while epoch < int(args["epochs"]):
    for number in range(512 // batch):
        if epoch and batch > int(args["fails_above"]):
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")
        corners = torch.randint(size - 4, (batch, 2), device=device)
        pictures = torch.zeros(batch, 1, size, size, device=device)
        for picture, (top, left) in zip(pictures, corners.tolist(), strict=True):
            picture[0, top : top + 4, left : left + 4] = 1
        box_loss = (model(pictures) - corners / size).square().mean()
        (box_loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    epoch += 1
    print(f"{epoch}/{args['epochs']}  box_loss {box_loss:.4f}  batch {batch}")
    weights.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "epoch": epoch}, weights / "last.pt")
