"""Who is what: collects the role of each port, and what speaks against it, into a topology."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from harness.ports import Dimension, Port, PortInventory
from harness.topology.acceptance import CROSS_ROLES, SELF_KV_ROLES, CacheBinding
from harness.topology.findings import Finding, quoted
from harness.topology.spec import PortRole, Role, StatePair, Topology

__all__ = ["Direction", "Placement"]

Direction = Literal["input", "output"]


class Placement:
    """Roles of the ports of one graph, while they are being found out.

    Attributes:
        inventory: the graph's ports.
        inputs: role by input name, of those that are placed.
        outputs: role by output name, of those that are placed.
        findings: what speaks against a topology so far.
        warnings: what speaks against declarations that are kept, in sentences.
        static_cache: the fields of a static cache, None where there is none.
    """

    def __init__(self, inventory: PortInventory) -> None:
        self.inventory = inventory
        self.inputs: dict[str, PortRole] = {}
        self.outputs: dict[str, PortRole] = {}
        self.findings: list[Finding] = []
        self.warnings: list[str] = []
        self.static_cache: Mapping[str, str | Sequence[str]] | None = None
        self._ports = {
            "input": {port.name: port for port in inventory.inputs},
            "output": {port.name: port for port in inventory.outputs},
        }

    def port(self, name: str, direction: Direction) -> Port | None:
        """The port of that name, None where the graph has none."""
        return self._ports[direction].get(name)

    def place(
        self,
        name: str,
        direction: Direction,
        role: Role,
        because: str,
        *,
        pair: str | None = None,
        layer: int | None = None,
    ) -> None:
        """Give a port its role. A port that has another one is a finding, and keeps the first."""
        side = self.inputs if direction == "input" else self.outputs
        known = side.get(name)
        if known is not None:
            self.findings.append(
                Finding(
                    "E_ROLE_OVERLAP",
                    f"{quoted(name)} cannot be {known.role.value} and {role.value}: a port has one role. "
                    "Declare it once under model.io.",
                    (name,),
                )
            )
            return
        side[name] = PortRole(name, direction, role, because, pair=pair, layer=layer)

    def place_binding(self, binding: CacheBinding) -> None:
        """Place both ports of a cache."""
        present = binding.present
        partner = None if present is None else present.name
        self.place(
            binding.past.name, "input", binding.role, binding.because, pair=partner, layer=binding.layer
        )
        if present is not None:
            self.place(
                present.name,
                "output",
                binding.role,
                binding.because,
                pair=binding.past.name,
                layer=binding.layer,
            )

    def taken(self, role: Role) -> str | None:
        """Name of the first port with this role, None where there is none."""
        return _first(self.inputs, role) or _first(self.outputs, role)

    def shapes(self, role: Role) -> list[tuple[Dimension, ...]]:
        """Shapes of the inputs with this role, in graph order; empty where the graph does not say one."""
        ports = [port for port in self.inventory.inputs if port.name in self.inputs]
        return [port.shape or () for port in ports if self.inputs[port.name].role is role]

    def open_inputs(self) -> list[Port]:
        """Inputs without a role, in graph order."""
        return [port for port in self.inventory.inputs if port.name not in self.inputs]

    def open_outputs(self) -> list[Port]:
        """Outputs without a role, in graph order."""
        return [port for port in self.inventory.outputs if port.name not in self.outputs]

    def topology(self) -> Topology:
        """What the roles add up to. Lists are in the order of the graph's inputs.

        Buffers of a static cache do not grow, so they stand in `static_cache` and not in `kv_inputs`.
        """
        static_cache = self.static_cache
        inputs = [self.inputs[port.name] for port in self.inventory.inputs if port.name in self.inputs]
        outputs = [self.outputs[port.name] for port in self.inventory.outputs if port.name in self.outputs]
        scattered = {
            name for field in (static_cache or {}).values() if not isinstance(field, str) for name in field
        }
        kv = [port for port in inputs if port.role in SELF_KV_ROLES and port.name not in scattered]
        cross = [port for port in inputs if port.role in CROSS_ROLES]
        return Topology(
            token_input=_first(self.inputs, Role.TOKEN),
            inputs_embeds_input=_first(self.inputs, Role.EMBEDS),
            attention_mask_input=_first(self.inputs, Role.ATTENTION_MASK),
            position_ids_input=_first(self.inputs, Role.POSITION_IDS),
            logits_output=_first(self.outputs, Role.LOGITS),
            kv_inputs=tuple(port.name for port in kv),
            kv_outputs=tuple(_partners(kv)),
            state_pairs=tuple(
                StatePair(port.name, port.pair)
                for port in inputs
                if port.role is Role.STATE and port.pair is not None
            ),
            cross_kv_inputs=tuple(port.name for port in cross),
            cross_kv_outputs=tuple(_partners(cross)) if all(port.pair for port in cross) else (),
            encoder_hidden_states_input=_first(self.inputs, Role.ENCODER_HIDDEN_STATES),
            static_cache=static_cache,
            optional_inputs=tuple(port.name for port in inputs if port.role is Role.OPTIONAL),
            roles=(*inputs, *outputs),
            inventory=self.inventory,
        )


def _first(side: Mapping[str, PortRole], role: Role) -> str | None:
    return next((name for name, port in side.items() if port.role is role), None)


def _partners(ports: Iterable[PortRole]) -> Iterable[str]:
    return (port.pair for port in ports if port.pair is not None)
