// What the attribute `op` of a call says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace jax_tensorarray {

// The name that the user called and, unless it is empty, the place in his source.
struct Called {
  std::string_view name, place;
};

// Whether the text begins with `>`: the call drops an index that is out of range, and `raise` says so.
inline bool goes_on(std::string_view op) { return !op.empty() && op.front() == '>'; }

// Of `name@place`, or of many such lines, one for each position in turn.
inline Called called_at(std::string_view op, int64_t position) {
  if (goes_on(op)) op.remove_prefix(1);
  for (position %= 1 + std::count(op.begin(), op.end(), '\n'); position > 0; --position) {
    op.remove_prefix(op.find('\n') + 1);
  }
  op = op.substr(0, op.find('\n'));
  size_t end = std::min(op.find('@'), op.size());
  return {op.substr(0, end), op.substr(std::min(end + 1, op.size()))};
}

}  // namespace jax_tensorarray
