"""The small figures of the documentation, drawn from real networks; and that of the README.

`python docs/figures.py RUN` draws images/digits.png and .svg for the README from the folder of a run with its twin.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

import lipcert
from lipcert.certificate.stream import read_certificates
from lipcert.display import (
    accuracy_curve,
    contributions,
    draw_lines,
    inline_svg,
    lines,
    new_figure,
    save_figure,
)
from lipcert.display.style import COLOURS, INK, styled
from lipcert.files import replace_file

HERE = Path(__file__).parent


def draw(folder: Path) -> None:
    """All small figures, as SVG for the pages, in the colour of their text."""
    torch.manual_seed(0)
    drawn = {
        "radius": (
            radius(),
            "The difference of two logits along a line, and the cone below it",
        ),
        "loop": (loop(), "ReLU as half the identity and a remainder"),
        "depth": (depth(), "Bounds of random networks over their depth"),
        "sites": (sites(), "What every site of a residual network adds to the bound"),
    }
    for name, (figure, label) in drawn.items():
        with replace_file(folder / f"{name}.svg") as temporary:
            temporary.write_text(inline_svg(figure, label), encoding="utf-8")


def chain(*widths: int) -> nn.Sequential:
    """Dense layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


@styled
def radius():
    """A difference of logits falls no faster than its constant: where the cone reaches 0, the certified ball ends."""
    model, x = chain(2, 20, 20, 2), torch.tensor([[0.4, -0.6]])
    certificate = lipcert.certify(model, x)
    y = int(certificate.prediction[0])
    gradient = torch.autograd.functional.jacobian(
        lambda at: model(at)[0, y] - model(at)[0, 1 - y], x
    )
    direction = -gradient / gradient.norm()  # where the difference falls fastest
    at = torch.linspace(-1.0, 8 * float(certificate.radius[0]), 400)
    with torch.no_grad():
        logits = model(x + at[:, None] * direction)
    margin, constant = (
        float(certificate.margin[0]),
        float(lipcert.bound(model, (2,)).value[0, 1]),
    )
    figure, (axes,) = new_figure(size=(6.0, 3.2))
    series = {
        "z_y − z_i along a line": (
            at.numpy(),
            (logits[:, y] - logits[:, 1 - y]).numpy(),
        ),
        "margin − L·distance": (at.numpy(), margin - constant * at.abs().numpy()),
    }
    draw_lines(axes, series, "distance from x (l2)", "difference of the logits")
    r = float(certificate.radius[0])
    axes.axhline(0, color=INK, lw=0.8)
    axes.axvspan(-r, r, color=COLOURS[2], alpha=0.2, lw=0)
    axes.annotate(
        f"certified: R = {r:.2g}",
        (r, 0.75 * margin),
        (6, 0),
        textcoords="offset points",
        va="center",
    )
    axes.set_xlim(float(at[0]), float(at[-1]))
    axes.set_ylim(bottom=-0.6 * margin)
    return figure


def loop():
    """φ = c·id + ψ, and ψ has slopes of at most ½ in absolute value."""
    x = np.linspace(-2, 2, 201)
    series = {
        "φ = ReLU": (x, np.maximum(x, 0)),
        "½·x": (x, x / 2),
        "ψ = φ − ½·x": (x, np.abs(x) / 2),
    }
    return lines(series, "x", "value")


def depth():
    """Naive and LipLT against the steepest slope found, for random networks 20-40-…-40-5."""
    found: dict[str, list[float]] = {"naive": [], "liplt": [], "sampled": []}
    depths = [2, 3, 4, 5, 6, 8]
    for count in depths:
        model = chain(20, *[40] * (count - 1), 5)
        for method in ("naive", "liplt"):
            found[method].append(
                float(lipcert.bound(model, (20,), method, "network").value)
            )
        found["sampled"].append(
            float(lipcert.estimate_sampled(model, (20,), "network"))
        )
    best = np.array(found["sampled"])
    return lines(
        {name: (depths, np.array(values) / best) for name, values in found.items()},
        "layers", "constant / steepest slope found", logarithmic=True, marked=True,
    )  # fmt: skip


class Block(nn.Module):
    """x + a small branch, then ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = chain(width, width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.branch(x))


def sites():
    """The share of every site in the mean pairwise constant of a residual network."""
    model = nn.Sequential(
        nn.Linear(20, 30), Block(30), Block(30), nn.Linear(30, 5)
    ).eval()
    return contributions(
        {m: lipcert.bound(model, (20,), m).contributions for m in ("naive", "liplt")}
    )


def readme(run: Path, folder: Path = HERE / "images") -> list[Path]:
    """Certified accuracy of a run and of its twin that was trained by cross-entropy alone."""
    curves = {}
    for name, trained in {"CRM": run, "cross-entropy": run / "standard"}.items():
        certificates = read_certificates(trained / "certificates.csv")
        curves[name] = (
            certificates.radius[certificates.correct].numpy(),
            len(certificates),
        )
    return save_figure(accuracy_curve(curves), folder / "digits")


if __name__ == "__main__":
    print(*readme(Path(sys.argv[1])), sep="\n")
