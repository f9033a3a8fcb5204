"""The user contexts of this library, each a part of the key in JAX's caches.

The import of the library makes them. Later, JAX forbids new ones while other threads use JAX, and after each new one it
compiles every program again.
"""

import jax

#: Whether `disable_in_place` or `enable_in_place` decides, and how: "off", "on" or None.
decided = jax.make_user_context(None)

#: The listener for remarks of `in_place`. JAX traces everything again for it, so `in_place` applies all its rules
#: again.
listening = jax.make_user_context(None)

#: Whether we trace a loop of JAX to lower it to one of ours. Then `in_place` need not rewrite it yet.
becomes_ours = jax.make_user_context(False)

#: The options with which `in_place` rewrites a loop before its differentiation. Afterwards the loop chooses residuals.
repairs_first = jax.make_user_context(None)

#: The bound that `growing` gives to arrays and loops while a function is traced, or None.
bound = jax.make_user_context(None)
