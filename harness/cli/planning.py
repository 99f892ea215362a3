"""From a package to a decoder that can be driven: its topology, its graphs, and what its encoder is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.output import report_warning
from harness.decode.prefix import Prefix, forced_prefix
from harness.errors import InputError

if TYPE_CHECKING:
    from harness.decode.assembling import Assembly, GivenInput
    from harness.decode.plan import ExtraFeeds
    from harness.decode.reach import Reach
    from harness.package import Package
    from harness.ports import PortInventory
    from harness.topology.spec import Derivation, Topology

__all__ = ["Conditioning", "Decoder", "derive_decoder", "plan_decoder"]


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What a decoder goes by besides the tokens before.

    Attributes:
        assembly: the decoder with all its graphs.
        prefix: tokens that it is fed first.
        feeds: what encoders take at every prompt; without the source text, which differs.
        takes_source: whether prompts are texts for the encoder, which the decoder then answers.
        not_forced: what its package forces behind an open position, for people; empty where there is none.
    """

    assembly: Assembly
    prefix: tuple[int, ...] = ()
    feeds: ExtraFeeds = field(default_factory=dict)
    takes_source: bool = False
    not_forced: str = ""

    def source(self, source_ids: tuple[int, ...]) -> ExtraFeeds:
        """What is fed for a source text."""
        from harness.decode.encoder_inputs import source_feeds

        given = [each for each in self.assembly.given if each.port.name not in self.feeds]
        return {**self.feeds, **source_feeds(given, source_ids)}

    def warn_of_what_is_not_forced(self, requests: Sequence[object]) -> None:
        """Say what is decoded where a prompt, of token IDs or another, begins with the prefix alone."""
        if self.not_forced and any(
            self.takes_source or not isinstance(request, tuple) or request == self.prefix
            for request in requests
        ):
            report_warning(
                "forced_decoder_ids leaves a position open, and what it forces behind that, "
                f"{self.not_forced}, is not forced but decoded. "
                "Give --prompt-ids with all that is to be forced."
            )


@dataclass(frozen=True, slots=True)
class Decoder:
    """A package's decoder, ready to be opened on any engine.

    Attributes:
        topology: of the whole.
        inventory: its ports as the files have them.
        graphs: every graph that runs, in order.
        conditioning: what it goes by.
        reach: how far it goes.
    """

    topology: Topology
    inventory: PortInventory
    graphs: tuple[Path, ...]
    conditioning: Conditioning
    reach: Reach


def derive_decoder(package: Package, *, ignore_declared: bool) -> Derivation:
    """The topology of the package's decoder, taken as one graph; see `resolve_package`.

    Its warnings go to standard error.
    """
    from harness.decode.parts import decoder_inventory
    from harness.topology.resolve import resolve_package

    derivation = resolve_package(package, decoder_inventory(package), ignore_declared=ignore_declared)
    for warning in derivation.warnings:
        report_warning(warning)
    return derivation


def plan_decoder(package: Package, topology: Topology, *, inputs: Path | None, seed: int) -> Decoder:
    """Put the graphs of a package together, and see what its encoder is given.

    Args:
        package: its graphs are read.
        topology: of its decoder.
        inputs: `.npz` with what the encoder takes, or would give; None to make it up.
        seed: of what is made up.

    Raises:
        InputError: a component is missing, or could be several; or the file does not fit.
    """
    from harness.decode.assembling import assemble
    from harness.decode.encoder_inputs import given_values, read_inputs
    from harness.decode.reach import Reach, declared_lengths

    assembly = assemble(package, topology)
    given, source = assembly.given, assembly.source_tokens
    if inputs is not None and not given:
        raise InputError(
            f"--inputs: {package.folder} has no encoder, and its decoder takes nothing of one.",
            next_action="Leave it out.",
        )
    takes_source = source is not None
    if source is not None and inputs is not None and {source.name, source.port.name} & {*read_inputs(inputs)}:
        takes_source = False
    if takes_source:
        _refuse_mask_alone(given, inputs)
        given = tuple(each for each in given if each.kind in ("features", "states"))
    config = package.config("config.json")
    reach = Reach(assembly, config, declared_lengths(package))
    values = None
    if given or inputs is not None:
        values = given_values(given, file=inputs, seed=seed, config=config)
    if values is not None and inputs is None:
        values = given_values(reach.fitted(given, values.feeds), file=None, seed=seed, config=config)
    prefix = forced_prefix(package) if assembly.given else Prefix()
    notes = _notes(assembly, prefix, None if values is None else values.origin, takes_source=takes_source)
    assembly = replace(assembly, wiring=replace(assembly.wiring, notes={**assembly.wiring.notes, **notes}))
    return Decoder(
        assembly.topology,
        assembly.wiring.inventory,
        tuple(step.graph for step in assembly.wiring.steps),
        Conditioning(
            assembly,
            prefix.token_ids,
            {} if values is None else values.feeds,
            takes_source,
            prefix.open_end,
        ),
        reach,
    )


def _refuse_mask_alone(given: Sequence[GivenInput], inputs: Path | None) -> None:
    """The prompt is what a text encoder reads, all of it: a mask in the file would mean nothing."""
    from harness.decode.encoder_inputs import read_inputs

    names = {} if inputs is None else read_inputs(inputs)
    tokens = next(each.name for each in given if each.kind == "tokens")
    for each in given:
        if each.kind == "mask" and names.keys() & {each.name, each.port.name}:
            raise InputError(
                f"--inputs: {inputs} has {each.name} and no {tokens}, so that the encoder reads the prompt, "
                "of which nothing is masked.",
                next_action=f"Save {tokens} beside it, or leave it out.",
            )


def _notes(assembly: Assembly, prefix: Prefix, origin: str | None, *, takes_source: bool) -> dict[str, str]:
    """What the report says about an encoder and what it is given."""
    if not assembly.given:
        return {}
    runs = any(step.when == "once" for step in assembly.wiring.steps)
    inputs = [text for text in ("the prompt" if takes_source else None, origin) if text is not None]
    notes = {
        "encoder": "runs once" if runs else "is not in the package",
        "encoder_inputs" if runs else "encoder_outputs": "; ".join(inputs),
    }
    if takes_source:
        # Elsewhere it stands at the beginning of the prompt's IDs.
        notes["decoder_prefix"] = " ".join(map(str, prefix.token_ids))
    if prefix.not_forced:
        notes["not_forced"] = prefix.open_end
    return notes
