"""The part of a step that each instruction of a program belongs to, also of those without a name.

JAX names what is differentiated, and its transpose (`phase_of`). The update of an optimizer has no such name:
it is what is computed from gradients and is not part of their computation. And what the compiler itself adds,
such as copies, belongs to what uses it.
"""

from __future__ import annotations

import collections

from scalax._planning.program.call_tree import Visit
from scalax._planning.program.counting import PHASES, Phase, phase_of
from scalax._planning.program.hlo import Computation, Instruction, Module

_GRADIENTS = ('backward', 'recomputed')
_MOST_STEPS = 8  # from what the compiler added to what uses it


class PhaseFinder:
    """The parts of a step, for the instructions of one program.

    Args:
        module: the program.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[tuple[str, str], frozenset[str]] = {}

    def of(self, visit: Visit, instruction: Instruction) -> Phase:
        """The part of an instruction."""
        phase = self._own(visit, instruction)
        if phase != 'other':
            return phase
        if visit.caller is not None and visit.caller.opcode in ('async-start', 'fusion') and visit.parent:
            return self.of(visit.parent, visit.caller)
        if self._is_update(visit):
            return 'update'
        after = self._after_gradients(visit)
        for _ in range(_MOST_STEPS):
            if instruction.name in after:
                return 'update'
            if '/' in visit.op_name(instruction):
                return 'other'
            users = visit.computation.users.get(instruction.name)
            if not users:
                break
            instruction = users[0]
            if (phase := self._own(visit, instruction)) != 'other':
                return phase
        return 'other' if visit.caller is None else _most(visit, visit.computation)

    def _own(self, visit: Visit, instruction: Instruction) -> Phase:
        """The part that the name of an instruction says; of a loop without one what most is in it."""
        phase = visit.phase_of(instruction)
        if phase == 'other' and instruction.opcode == 'while' and '/' not in visit.op_name(instruction):
            [body] = self._module.called(instruction, 'body')
            return _most(visit, body)
        return phase

    def _is_update(self, visit: Visit) -> bool:
        """Whether all of a computation that is called is part of the update."""
        if visit.parent is None or visit.caller is None:
            return False
        return self._is_update(visit.parent) or (
            self._own(visit.parent, visit.caller) == 'other'
            and visit.caller.name in self._after_gradients(visit.parent)
        )

    def _after_gradients(self, visit: Visit) -> frozenset[str]:
        """The instructions that use gradients, or make what only these use.

        None inside of loops, where the next round takes more gradients.
        """
        outer: Visit | None = visit
        while outer is not None and outer.caller is not None:
            if outer.caller.opcode != 'call':
                return frozenset()
            outer = outer.parent
        key = visit.computation.name, visit.scope
        if key not in self._known:
            computation = visit.computation
            instructions = [*computation.instructions.values()]
            own = {each.name: self._own(visit, each) for each in instructions}
            # A loop, a branch or a call may compute gradients, such as those of micro-batches.
            own |= {
                each.name: 'backward'
                for each in computation.calling
                if each.opcode != 'fusion' and any(map(self._has_gradients, self._module.calls(each)))
            }
            gradients, after = set[str](), set[str]()
            for each in instructions:
                uses = any(operand.partition('#')[0] in gradients for operand in each.operands)
                if uses or own[each.name] in _GRADIENTS:
                    gradients.add(each.name)
            for each in reversed(instructions):
                users = computation.users.get(each.name, ())
                last = all(user.name in after for user in users) if users else each.name in gradients
                if last and own[each.name] == 'other':
                    after.add(each.name)
            self._known[key] = frozenset(after)
        return self._known[key]

    def _has_gradients(self, computation: Computation) -> bool:
        return any(phase_of(each.op_name) in _GRADIENTS for each in computation.instructions.values()) or any(
            any(map(self._has_gradients, self._module.calls(each))) for each in computation.calling
        )


def _most(visit: Visit, computation: Computation) -> Phase:
    """The part to which most instructions of a computation with a part belong."""
    counts = collections.Counter(map(visit.phase_of, computation.instructions.values()))
    return max(PHASES, key=lambda phase: counts[phase] if phase != 'other' else 0.5)
