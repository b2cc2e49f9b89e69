"""A residual network with batch norm, trained here in seconds on scikit-learn's 1797 handwritten digits.

Run it with: backend-kwargs compare examples/digits.py:build
"""

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

EPOCHS = 6
BATCH = 64


class Block(nn.Module):
    """Two convolutions with batch norm and a shortcut: [batch, width, h, w] to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return relu(x + self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))))


class DigitNet(nn.Sequential):
    """Logits [batch, 10] of images [batch, 1, 8, 8] with values from 0 to 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width),
            nn.MaxPool2d(2),
            Block(width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, held-out images and the two label vectors, split the same way each time."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(range(len(labels)), test_size=0.25, random_state=0, stratify=digits.target)
    return images[train], images[held_out], labels[train], labels[held_out]


def train(images: Tensor, labels: Tensor) -> nn.Module:
    """Train on the CPU from a fixed seed, the caller's random state untouched; return the model in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DigitNet().train()
        steps = EPOCHS * -(-len(images) // BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(images)).split(BATCH):
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose highest logit is the label."""
    return (model(images).argmax(1) == labels).float().mean().item()


def build() -> tuple[nn.Module, tuple[Tensor]]:
    """Return the trained network in eval mode and a batch of held-out images, on the GPU if there is one."""
    images, held_out, labels, held_out_labels = data()
    print("Training on scikit-learn's digits: about two seconds.", file=sys.stderr)
    model = train(images, labels)
    share = accuracy(model, held_out, held_out_labels)
    if share <= 0.95:
        raise RuntimeError(
            f"The training failed: {share:.1%} of the held-out digits are right; it must be more than 95 %."
        )
    print(f"{share:.1%} of the {len(held_out)} held-out digits are right.", file=sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), (held_out[:64].to(device),)


if __name__ == "__main__":
    build()
