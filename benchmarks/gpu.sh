#!/usr/bin/env bash
# All that is to be done where there is a GPU, in ten minutes: install without a network, the suite, the sanitizers of
# CUDA, and the table of figures, which is left in benchmarks/results.
#
#     benchmarks/gpu.sh                                # on a machine with a GPU
#     benchmarks/gpu.sh --wheel FILE                   # likewise, with kernels that have been built elsewhere
#     benchmarks/gpu.sh --platform cpu --quick         # anywhere: to see that it runs through
#
# A wheel for the machine that is lent at times, an H200 with Python 3.12:
#
#     JAX_TENSORARRAY_CUDA=ON pip wheel --no-deps --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=90 .
#
# PYTHON names the interpreter. What it needs is installed there: jax with its CUDA plugin, scikit-build-core, nanobind,
# cmake and ninja, hypothesis, pytest and pytest-xdist, and nvcc on PATH. optax, equinox and compute-sanitizer are used if there.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

platform=cuda quick=() install=yes wheel=
while [ $# -gt 0 ]; do
  case $1 in
    --platform) platform=$2; shift ;;
    --quick) quick=(--quick) ;;
    --no-install) install=no ;;
    --wheel) wheel=$2; shift ;;
    *) echo "usage: benchmarks/gpu.sh [--platform cpu] [--quick] [--no-install | --wheel FILE]"; exit 2 ;;
  esac
  shift
done
python=${PYTHON:-python3}
export JAX_PLATFORMS=$platform XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
output=benchmarks/results/gpu-$platform${quick:+-quick}.json
failed=()

# The limits add up to less than ten minutes.
# part NAME SECONDS COMMAND...: what fails or takes too long is listed at the end, and the rest goes on.
part() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  printf '\n=== %s (at most %ss)\n' "$name" "$limit"
  timeout --kill-after=5 "$limit" "$@"
  local status=$?
  [ $status -eq 0 ] || failed+=("$name: exit code $status$([ $status -eq 124 ] && echo ', out of time')")
  printf '=== %s: %ss\n' "$name" $((SECONDS - start))
}

if [ -n "$wheel" ]; then
  part install 60 "$python" -m pip install --no-deps --no-index --force-reinstall "$wheel"
elif [ "$install" = yes ]; then
  cuda=ON && [ "$platform" = cpu ] && cuda=OFF
  part install 120 env JAX_TENSORARRAY_CUDA=$cuda "$python" -m pip install --no-build-isolation --no-deps --no-index \
    --force-reinstall --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=native .
fi

# Kernel tests: what the ops mean, on sizes that fill a GPU too. TENSORARRAY_NEEDS_GPU turns skips into failures.
kernels=(tests/gpu/test_gpu.py tests/ops/test_starts.py tests/ops/test_dtypes.py)
[ "$platform" = cpu ] || export TENSORARRAY_NEEDS_GPU=1
workers=$(($(nproc) > 12 ? 12 : $(nproc)))
part "kernel tests" 60 "$python" -m pytest -q -n "$workers" "${kernels[@]}" tests/ops/test_index_errors.py
if [ ${#quick[@]} -eq 0 ]; then
  # The tests that are left out need no GPU: they are CI's.
  part suite 170 "$python" -m pytest -q -n "$workers" --all --maxfail=40 --ignore=tests/gpu/test_gpu_hlo.py \
    --ignore=tests/gpu/test_cuda_host.py --ignore=tests/docs/test_main.py --ignore=tests/array/test_tensorflow_programs.py \
    --ignore=tests/docs/test_benchmarks.py
fi

if command -v compute-sanitizer > /dev/null && [ "$platform" = cuda ]; then
  for tool in memcheck racecheck; do
    part "$tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$python" -m pytest -q -p no:xdist tests/gpu/test_gpu.py -k "sanitized"
  done
else
  echo "compute-sanitizer is not here, or there is no GPU: left out"
fi

rm -f "$output"
figures() {  # LABEL SECONDS PARTS...
  local label=$1 seconds=$2
  shift 2
  part "figures: $label" $((seconds + 12)) "$python" benchmarks/gpu.py --label "$label" --seconds "$seconds" \
    --output "$output" ${quick[@]+"${quick[@]}"} --part "$@"
}
figures "XLA's defaults" 60 ops dtypes duplicates threshold training rows loops
if [ "$platform" = cuda ]; then
  commands=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=$commands" figures "command buffers with custom calls" 25 rows loops
  XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" figures "no command buffers" 25 rows loops
fi

printf '\n=== %ss in all; figures in %s\n' "$SECONDS" "$output"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED %s\n' "${failed[@]}"
  exit 1
fi
