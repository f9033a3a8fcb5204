"""The user contexts of this library, each a part of the key in JAX's caches.

They are made when the library is imported, and not where they are used. JAX forbids to make one while other threads use
JAX, and after each new one it compiles every program again.
"""

import jax

#: Whether `disable_in_place` or `enable_in_place` decides, and how: "off", "on" or None.
decided = jax.make_user_context(None)

#: The listener for remarks of `in_place`. JAX traces everything again for it, so that all rules are consulted.
listening = jax.make_user_context(None)

#: Whether a loop of JAX is traced to become one of ours, which `in_place` need not look at yet.
becomes_ours = jax.make_user_context(False)

#: The options by which `in_place` rewrites a loop before it is differentiated. After that the loop has its choice.
repairs_first = jax.make_user_context(None)

#: The bound that `growing` gives to arrays and loops while a function is traced, or None.
bound = jax.make_user_context(None)
