// Parses the attribute `op` of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace jax_tensorarray {

// The function that the user called, or the whole text of an error that is not about an index, and its place in the
// source, which may be empty.
struct Named {
  std::string_view name, place;
  bool is_text;
};

// Whether the call drops an index out of range and leaves the error to `raise`, as a leading `>` says.
inline bool goes_on(std::string_view op) { return !op.empty() && op.front() == '>'; }

// Parses `name@place`, or `!text@place`. If there are several such lines, the positions take them in turn.
inline Named named_at(std::string_view op, int64_t position) {
  if (goes_on(op)) op.remove_prefix(1);
  for (position %= 1 + std::count(op.begin(), op.end(), '\n'); position > 0; --position) {
    op.remove_prefix(op.find('\n') + 1);
  }
  op = op.substr(0, op.find('\n'));
  bool is_text = !op.empty() && op.front() == '!';
  if (is_text) op.remove_prefix(1);
  size_t end = std::min(op.find('@'), op.size());
  return {op.substr(0, end), op.substr(std::min(end + 1, op.size())), is_text};
}

}  // namespace jax_tensorarray
