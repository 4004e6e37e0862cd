#!/bin/sh
# Builds the extensions of strata.native in place for development: scripts/build_native.sh [python]
# The python needs nanobind; the .so files land beside src/strata/native/__init__.py (git-ignored).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
build="$root/build/native-$tag"
generator=
command -v ninja >/dev/null && generator="-G Ninja"
# shellcheck disable=SC2086
cmake -S "$root" -B "$build" $generator -DPython_EXECUTABLE="$(command -v "$python")" >/dev/null
cmake --build "$build" --parallel "${JOBS:-2}"
cmake --install "$build" --prefix "$build/stage" >/dev/null
# a rename leaves processes that have the old file loaded alone
for file in "$build"/stage/strata/native/_*.so; do
    to="$root/src/strata/native/$(basename "$file")"
    cp "$file" "$to.new" && mv -f "$to.new" "$to" && echo "$to"
done
