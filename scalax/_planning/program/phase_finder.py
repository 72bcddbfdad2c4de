"""The phase of each instruction of a program, including instructions whose name does not contain it.

JAX names the differentiated computation and its transpose (`phase_of`), but not the optimizer's update: that
is the computation that uses gradients and is not part of computing them. Instructions that the compiler adds,
such as copies, belong to the phase of their users.
"""

from __future__ import annotations

import collections

from scalax._planning.program.call_tree import ComputationInstance
from scalax._planning.program.hlo import Computation, Instruction, Module
from scalax._planning.program.phases import PHASES, Phase, phase_of

_GRADIENT_PHASES = ('backward', 'recomputed')
_MAX_HOPS = 8  # from an instruction that the compiler added to one with a phase


class PhaseFinder:
    """Finds the phases of the instructions of one program.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._updates: dict[tuple[str, str], frozenset[str]] = {}

    def of(self, instance: ComputationInstance, instruction: Instruction) -> Phase:
        """Returns the phase of an instruction."""
        phase = self._named_phase(instance, instruction)
        if phase != 'other':
            return phase
        caller, parent = instance.caller, instance.parent
        if caller is not None and caller.opcode in ('async-start', 'fusion') and parent:
            return self.of(parent, caller)
        if self._is_called_by_update(instance):
            return 'update'
        update = self._update_instructions(instance)
        for _ in range(_MAX_HOPS):
            if instruction.name in update:
                return 'update'
            if '/' in instance.op_name(instruction):
                return 'other'
            users = instance.computation.users.get(instruction.name)
            if not users:
                break
            instruction = users[0]
            if (phase := self._named_phase(instance, instruction)) != 'other':
                return phase
        return 'other' if caller is None else _most_frequent_phase(instance, instance.computation)

    def _named_phase(self, instance: ComputationInstance, instruction: Instruction) -> Phase:
        """Returns the phase in an instruction's name; for an unnamed loop, the prevalent one of its body."""
        phase = instance.phase_of(instruction)
        if phase == 'other' and instruction.opcode == 'while' and '/' not in instance.op_name(instruction):
            [body] = self._module.called(instruction, 'body')
            return _most_frequent_phase(instance, body)
        return phase

    def _is_called_by_update(self, instance: ComputationInstance) -> bool:
        """Whether a computation is called, directly or not, by an instruction of the update."""
        if instance.parent is None or instance.caller is None:
            return False
        return self._is_called_by_update(instance.parent) or (
            self._named_phase(instance.parent, instance.caller) == 'other'
            and instance.caller.name in self._update_instructions(instance.parent)
        )

    def _update_instructions(self, instance: ComputationInstance) -> frozenset[str]:
        """Returns the instructions that use gradients, or compute something for these alone.

        There are none inside loops, where the next iteration computes more gradients.
        """
        outer: ComputationInstance | None = instance
        while outer is not None and outer.caller is not None:
            if outer.caller.opcode != 'call':
                return frozenset()
            outer = outer.parent
        key = instance.computation.name, instance.scope
        if key not in self._updates:
            self._updates[key] = self._find_update(instance)
        return self._updates[key]

    def _find_update(self, instance: ComputationInstance) -> frozenset[str]:
        computation = instance.computation
        instructions = [*computation.instructions.values()]
        phases = {item.name: self._named_phase(instance, item) for item in instructions}
        # A loop, a branch or a call may compute gradients, such as those of microbatches.
        phases |= {
            item.name: 'backward'
            for item in computation.calling
            if item.opcode != 'fusion' and any(map(self._computes_gradients, self._module.calls(item)))
        }
        gradients, update = set[str](), set[str]()
        for item in instructions:
            uses_gradients = any(operand.partition('#')[0] in gradients for operand in item.operands)
            if uses_gradients or phases[item.name] in _GRADIENT_PHASES:
                gradients.add(item.name)
        for item in reversed(instructions):
            users = computation.users.get(item.name, ())
            is_last = all(user.name in update for user in users) if users else item.name in gradients
            if is_last and phases[item.name] == 'other':
                update.add(item.name)
        return frozenset(update)

    def _computes_gradients(self, computation: Computation) -> bool:
        instructions = computation.instructions.values()
        return any(phase_of(item.op_name) in _GRADIENT_PHASES for item in instructions) or any(
            any(map(self._computes_gradients, self._module.calls(item))) for item in computation.calling
        )


def _most_frequent_phase(instance: ComputationInstance, computation: Computation) -> Phase:
    """Returns the most frequent phase of a computation; ``'other'`` only if there is no other one."""
    counts = collections.Counter(map(instance.phase_of, computation.instructions.values()))
    return max(PHASES, key=lambda phase: counts[phase] if phase != 'other' else 0.5)
