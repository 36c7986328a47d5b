"""`lipcert.bound`: guaranteed constants by the recursion over guaranteed norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn

from lipcert.bounds.bound import Bound, Facts
from lipcert.bounds.combining import combined
from lipcert.bounds.fingerprint import check_finite, fingerprint
from lipcert.bounds.fit import FitOptions
from lipcert.bounds.methods import Method, MethodTask, find_method
from lipcert.bounds.output_rows import check_rows_fit
from lipcert.bounds.targets import Target, default_target, find_target
from lipcert.network.build import trace
from lipcert.network.capture import CAPTURE_LOCK
from lipcert.network.normal_form import Network
from lipcert.network.program import Program
from lipcert.network.rules.registry import MODULE_RULES, find_module_rule
from lipcert.norms.norm_options import NormOptions
from lipcert.progress import Progress, no_progress
from lipcert.rounding import denormals_kept
from lipcert.version import VERSION


def bound(
    model: nn.Module,
    input_shape: tuple[int, ...],
    method: str = "liplt",
    target: str | None = None,
    *,
    options: NormOptions | None = None,
    fit: FitOptions | None = None,
    progress: Progress = no_progress,
) -> Bound:
    """Guaranteed upper bounds on the l2 Lipschitz constants of a model in eval mode.

    Norms are proved where the smaller side of a map is at most `options.dense_limit`,
    and hold with the stated probability elsewhere. Rounding is accounted for
    everywhere.

    Args:
        model: any model that `lipcert.trace` accepts.
        input_shape: shape of one input, without the batch axis.
        method: "naive", "liplt", "rescaled" (LipLT in better coordinates), "lt-sdp" (where matrices fit into memory),
            "lipsdp" (small networks), or "best", which combines all of them.
        target: "network", "per-class", "last-layer" or "pairwise"; if not given, pairwise, or network without logits.
        options: how the norms are bounded.
        fit: how the coordinates of "rescaled" and "best" are found.
        progress: called with what is being done and the fraction done.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> lipcert.bound(model, (4,)).value.shape
        torch.Size([3, 3])
    """
    targets = (target,)
    made = bound_targets(
        model, input_shape, method, targets, options=options, fit=fit, progress=progress
    )
    return next(iter(made.values()))


@torch.inference_mode(False)
def bound_targets(
    model: nn.Module,
    input_shape: tuple[int, ...],
    method: str,
    targets: Sequence[str | None],
    *,
    options: NormOptions | None = None,
    fit: FitOptions | None = None,
    network: Network | None = None,
    progress: Progress = no_progress,
) -> dict[str, Bound]:
    """`bound` for several targets, which share the norms; each bound's time is that of all of them.

    `network` is the trace of the model, if it is there already.
    """
    chosen, network = find_method(method), network or trace(model, input_shape)
    wanted = [find_target(name or default_target(network)) for name in targets]
    promised = promised_program(model, input_shape)
    return bound_network(
        network,
        chosen,
        wanted,
        options=options,
        fit=fit,
        promised=promised,
        progress=progress,
    )


@torch.inference_mode(False)
@denormals_kept()
def bound_network(
    network: Network,
    method: Method,
    targets: Sequence[Target],
    *,
    options: NormOptions | None = None,
    fit: FitOptions | None = None,
    promised: Program | None = None,
    progress: Progress = no_progress,
) -> dict[str, Bound]:
    """Bounds of a captured network, by the names of the targets."""
    began = perf_counter()
    # A capture by another thread replaces the model's tensors for a moment.
    with CAPTURE_LOCK:
        # From here on weights are copies: the model may go on training, the bound and
        # its fingerprint belong together.
        program = network.program.frozen()
    check_finite(program)
    for target in targets:
        target.check(network)
        if not target.whole_output:
            check_rows_fit(network)
    # Only the target network needs norms of whole maps to the output; for others rows
    # are pulled back.
    whole = any(target.whole_output for target in targets)
    # Of the copies, not of what the model's own tensors hold by now.
    digest = fingerprint(replace(network, program=program))
    options, fit = options or NormOptions(), fit or FitOptions()
    task = MethodTask(program, promised, whole, options, fit, progress, digest)
    bounds = {}
    for target in targets:
        bounds[target.name] = _bound(task, method, target, digest)
    seconds = perf_counter() - began
    for name, made in bounds.items():
        bounds[name] = replace(made, facts=replace(made.facts, seconds=seconds))
    return bounds


def promised_program(model: nn.Module, input_shape: tuple[int, ...]) -> Program | None:
    """The model with layers that are Lipschitz by construction as single operations; None if it has none."""
    # Rules for both views say what a layer computes; those for this view alone promise
    # a constant.
    special = set(MODULE_RULES["certified"]) - set(MODULE_RULES["residual"])
    layers = [module for module in model.modules() if type(module) in special]
    if not any(find_module_rule(module, "certified") for module in layers):
        return None
    return trace(model, input_shape, view="certified").program.frozen()


@torch.inference_mode(False)
@denormals_kept()
def promised_constants(
    model: nn.Module,
    input_shape: tuple[int, ...],
    targets: Sequence[str],
    progress: Progress = no_progress,
) -> dict[str, Tensor]:
    """Guaranteed values that rest on what layers promise by construction, proved for their present weights.

    Empty if the model has no such layers.
    """
    program = promised_program(model, input_shape)
    if program is None:
        return {}
    check_finite(program)
    wanted = [find_target(name) for name in targets]
    whole = any(target.whole_output for target in wanted)
    task = MethodTask(program, None, whole, NormOptions(), FitOptions(), progress)
    forms = [task.form("liplt"), task.form("naive")]
    values = {}
    for target in wanted:
        values[target.name] = combined(forms, target, {}, progress).tails[0]
    return values


def _bound(task: MethodTask, method: Method, target: Target, digest: str) -> Bound:
    forms = method.forms(task, target)
    numbers = combined(forms, target, method.values(task, target), task.progress)
    # Every form has a part of this probability (`_MOST_FORMS`), so that by the union
    # bound all norms hold together.
    probability, guarantee = 0.0, "deterministic"
    if any(form.norms.randomised for form in forms):
        probability = task.options.failure_probability
        guarantee = f"holds with probability ≥ 1 − {probability:g}"
    facts = Facts(
        method=method.name,
        target=target.name,
        guarantee=guarantee,
        failure_probability=probability,
        inflation=numbers.inflation,
        seconds=0.0,
        input_shape=task.program.input_shape,
        sites=numbers.sites,
        fingerprint=digest,
        library=_version(),
        winners=numbers.winners,
    )
    scales = method.scales(task, target)
    return Bound(facts, numbers.tails, numbers.between, numbers.shares, scales)


def _version() -> str:
    return f"lipcert {VERSION}, torch {torch.__version__}"
