"""The part of a step that each instruction of a program belongs to, also of those without a name.

JAX names what is differentiated, and its transpose (`part_of`). The update of an optimizer has no such name:
it is what is computed from gradients and is not part of their computation. And what the compiler itself adds,
such as copies, belongs to what uses it.
"""

from __future__ import annotations

from scalax._plan.formulas import Part
from scalax._plan.hlo import Instruction
from scalax._plan.hlo_loops import Visit

_MOST_STEPS = 8  # from what the compiler added to what uses it


class StepParts:
    """The parts of a step, for the instructions of one program."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], frozenset[str]] = {}

    def of(self, visit: Visit, instruction: Instruction) -> Part:
        """The part of an instruction."""
        part = visit.part_of(instruction)
        if part != 'other':
            return part
        if visit.caller is not None and visit.caller.opcode in ('async-start', 'fusion') and visit.parent:
            return self.of(visit.parent, visit.caller)
        if self._is_update(visit):
            return 'update'
        computation, after = visit.computation, self._after_gradients(visit)
        for _ in range(_MOST_STEPS):
            if instruction.name in after:
                return 'update'
            users = computation.users.get(instruction.name)
            if '/' in visit.op_name(instruction) or not users:
                break
            instruction = users[0]
            if (part := visit.part_of(instruction)) != 'other':
                return part
        return 'other'

    def _is_update(self, visit: Visit) -> bool:
        """Whether all of a computation that is called is part of the update."""
        if visit.parent is None or visit.caller is None:
            return False
        return self._is_update(visit.parent) or (
            visit.parent.part_of(visit.caller) == 'other'
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
            gradients, after = set[str](), set[str]()
            for instruction in computation.instructions.values():
                if any(each.partition('#')[0] in gradients for each in instruction.operands):
                    gradients.add(instruction.name)
                    after.add(instruction.name)
                elif visit.part_of(instruction) in ('backward', 'recomputed'):
                    gradients.add(instruction.name)
            for instruction in reversed([*computation.instructions.values()]):
                users = computation.users.get(instruction.name, ())
                if users and all(user.name in after and visit.part_of(user) == 'other' for user in users):
                    after.add(instruction.name)
            self._known[key] = frozenset(after)
        return self._known[key]
