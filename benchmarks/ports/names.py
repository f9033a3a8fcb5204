"""What a name of TensorFlow is called here. `ops.` is what JAX has under no name, or not with these arguments."""

_OF_NUMPY = {
    **{name: name for name in ("broadcast_to", "equal", "expand_dims", "float32", "greater", "int32", "less")},
    **{name: name for name in ("logical_not", "logical_or", "minimum", "not_equal", "ones_like", "reshape", "shape")},
    **{name: name for name in ("stack", "subtract", "unstack", "zeros", "zeros_like")},
    **{name: name for name in ("add", "greater_equal", "ones", "square")},
    **{"bool": "bool_", "cast": "asarray", "concat": "concatenate", "fill": "full", "math.log": "log"},
    **{"math.logical_and": "logical_and", "math.logical_not": "logical_not", "math.minimum": "minimum"},
    **{"pow": "power", "range": "arange", "rank": "ndim", "reduce_all": "all", "math.reduce_all": "all"},
    **{
        "reduce_any": "any",
        "reduce_max": "max",
        "reduce_min": "min",
        "maximum": "maximum",
        "newaxis": "newaxis",
        "math.logical_xor": "logical_xor",
        "reduce_sum": "sum",
        "compat.v1.transpose": "transpose",
    },
}

_OWN = (
    *("argmax", "argmin", "gather_nd", "matmul", "tensor_scatter_nd_add"),
    *("cond", "constant", "convert_to_tensor", "executing_eagerly", "gather", "get_static_value", "is_tensor"),
    *("one_hot", "reverse_sequence", "sequence_mask", "tile", "transpose", "where", "TensorShape", "Variable"),
)

NAMES = {
    **{f"tf.{name}": f"jnp.{here}" for name, here in _OF_NUMPY.items()},
    **{f"tf.{name}": f"ops.{name}" for name in _OWN},
    "tf.Tensor": "jax.Array",
    "tf.TensorArray": "tf.TensorArray",
    "tf.compat.dimension_value": "int",
    "tf.compat.v1.get_default_graph": "ops.get_default_graph",
    "tf.compat.v1.where": "ops.where_of_examples",
    "tf.compat.v1.while_loop": "tf.while_loop",
    "tf.debugging.assert_equal": "ops.assert_equal",
    "tf.debugging.assert_greater": "ops.assert_greater",
    "tf.foldl": "tf.foldl",
    "tf.math.cumsum": "ops.cumsum",
    "tf.name_scope": "jax.named_scope",
    "tf.nest.assert_same_structure": "ops.assert_same_structure",
    "tf.nest.flatten": "ops.flatten",
    "tf.nest.is_nested": "ops.is_nested",
    "tf.nest.map_structure": "tf.nest.map_structure",
    "tf.nest.pack_sequence_as": "ops.pack_sequence_as",
    "tf.nn.log_softmax": "jax.nn.log_softmax",
    "tf.nn.top_k": "jax.lax.top_k",
    "tf.random.uniform": "ops.random_uniform",
    "tf.while_loop": "tf.while_loop",
    "tf1.get_default_graph": "ops.get_default_graph",
    "ps.cond": "ops.cond",
    "ps.size0": "len",
}
