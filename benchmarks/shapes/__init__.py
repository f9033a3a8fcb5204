"""The shapes of loops that `in_place` finds: how many whole buffers a step moves before and after."""
