"""`sjit`: compiles a user's function with shardings that depend on its arguments, at the cost of `jax.jit`.

`function` holds the object that users get, `caller` the function that they call, `dispatch` the stages of a
call, and `program_table` the compiled programs.

::

    f(x) -- fast_call? -- yes -- jax.jit -- outputs
                |                   `- raises -- explain_or_retry -- a better error
                | none yet                              | wrong program
                `---- dispatch -------------------------'
                         `-- resolve -- find -- trace -- build -- place -- run -- outputs
                                          `-- known key ------------'

A repeated call passes the generated caller and the program alone; `dispatch` is the slow path.

Flat arguments. `jax.jit` takes shardings, static and donated arguments by position only, so a call becomes a
list of slots (`CallLayout`). Users call a generated function with their own parameters: Python binds the
arguments in C. A parameter left to its default is a pytree without leaves.

Programs. A program is one `jax.jit` with one set of shardings. Rules are resolved once for each call key:
the signature (tree structure, shapes, dtypes, weak types, static values) and JAX's trace context. Calls
whose rules resolve to the same shardings share a program, so a batch of another length costs no more than
under `jax.jit`.

The check inside the trace. A key of every leaf would cost up to hundreds of microseconds a call, and JAX
computes such a key anyway. So if a function has one program, a call goes straight to it; among several,
`ProgramTable` picks one by properties that are cheap to compare. While JAX traces the program's function,
the function checks that the call key is its own. If it is not, the function raises `WrongProgram` before any
user code runs, and `dispatch` finds or builds the right program. Everything in JAX's cache was checked when
it was traced. A wrong pick therefore costs time, but never gives a wrong sharding, donates a buffer or runs
user code twice. Errors that JAX raises before tracing are classified by the real call key. If the picked
program is right for a new call key, the key joins it without an exception: JAX never again uses its fast
path for a call whose first trace raised.

Trace contexts. Output shardings may depend on JAX's trace context (x64, matmul precision, the PRNG, the
mesh, mapped axes, bindings). Equal contexts are recognized by public means: JAX caches the trace of an empty
function by its trace context, so equal contexts return the same jaxpr object.

Replay. JAX gives an array that is placed on a mesh another type, even on Auto axes, so it traces a call with
NumPy arrays and a call with placed arrays. The second trace replays the jaxpr of the first. A jaxpr that
closes over values of an outer trace is discarded with that trace. No sequence of calls compiles more often
than with `jax.jit`.

Outputs. The function is traced once to learn its outputs. JAX finds that trace again when it compiles,
because it is the same function object. The rules for outputs are resolved inside the trace, for the tree
that the user's function returned. Outputs whose types on Explicit axes differ are resharded there: the
`out_shardings` of a jit change no types.

Devices. In a trace a mesh can be active without its devices; `jax.jit` takes devices from the shardings of
arguments and outputs, and from constraints on a mesh with devices. With a bare spec alone, JAX would compile
for one device and drop the spec. So if the jaxpr names the mesh (`names_mesh`) and no such sharding is
certain, the outputs are constrained to the mesh with all dimensions open (`constrain_to_devices`).

Bindings. The active helper and its bindings are a JAX user context (`jax.make_user_context`), which is part
of the key of JAX's own trace caches. Equal active bindings share one context object, compared by identity.
The context is entered inside the traced function, so a call costs nothing more, and any `set_mesh` of the
caller is respected. Used names are recorded for each function. Names used inside an inner trace are also
recorded on the context, and count for every function in it, because JAX may reuse such a trace without
running its code.

Placement. Unplaced data (NumPy arrays, numbers, uncommitted arrays) is left to `jax.jit` on Auto axes:
placed for the first call only, it would be compiled twice. On Explicit axes it is placed before tracing,
because there the sharding is part of the type. Arrays typed for another mesh with Explicit axes get types of
the helper's mesh, without moving.

Values of an outer trace. On Explicit axes JAX ignores the `in_shardings` of a jit for these values. So the
check inside the trace also compares types with the rules, and the slow path reshards differing values in the
outer trace, also under `on_mismatch='error'`: on Auto axes `in_shardings` are a constraint there too.

Memory. `sjit` of the same function, with equal options and pure rules, shares all traces and programs. They
live as long as both the function and the helper, refer to neither, and are freed with them.

The result of `sjit` is a `functools.partial` of the generated function, the cheapest callable object. Its
methods are on the type and not in `__dict__`, which libraries copy to derived functions.

Inside `shard_map` the user's function runs inline, with its bindings and without the shardings of its
`sjit`: shapes are local. Where mesh axes have other types than the helper's (inside JAX's `auto_axes` and
`explicit_axes`), the function runs inline too, and its shardings, resolved on the current mesh, are applied
to arguments and outputs there.
"""
