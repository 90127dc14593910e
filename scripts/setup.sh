#!/usr/bin/env bash
# Makes or updates the virtual environment; the last line of its output is the path of the environment's python.
#
# The environment lies outside the checkout, at $PP_SPEC_VENV or in the user's cache. Two stamps in it are written
# last, after everything they vouch for, so an interrupted run is simply continued by the next one:
#   dependencies.stamp   hash of the dependency part of pyproject.toml
#   package.stamp        this checkout's path and hash of pyproject.toml, whose entry points SGLang looks up
set -euo pipefail
cd "$(dirname "$0")/.."

checkout=$(pwd -P)
venv=${PP_SPEC_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang_pp_spec/venv}
python=$venv/bin/python

say() { echo "setup: $*" >&2; }

sha() { sha256sum | cut -d' ' -f1; }

dependencies_wanted() {
    sed -n -e '/^requires-python/p' -e '/^dependencies = \[/,/^]/p' \
        -e '/^\[project.optional-dependencies\]/,/^\[/p' pyproject.toml | sed 's/[[:space:]]*#.*//' | sha
}

package_wanted() { { echo "$checkout"; cat pyproject.toml; } | sha; }

holds() { [ "$(cat "$venv/$1" 2>/dev/null)" = "$2" ]; }

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

make_environment() {
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        say "FAILED: $venv holds something that is no virtual environment; set PP_SPEC_VENV to another folder"
        exit 1
    fi
    for candidate in python3.12 python3.11 python3 python; do
        if usable "$candidate"; then
            say "new environment in $venv from $(command -v "$candidate")"
            "$candidate" -m venv --clear "$venv" >&2 && return
            say "$candidate cannot make an environment; on Debian: apt-get install python3-venv"
        fi
    done
    if command -v uv >/dev/null; then
        say "new environment in $venv through uv"
        uv venv --clear --seed --python 3.12 "$venv" >&2 && return
    fi
    say "FAILED: no python 3.11 or 3.12 with venv; install python3.12 and python3.12-venv, or uv"
    exit 1
}

install_dependencies() {
    say "installing the dependencies (about five minutes and 12 GB the first time)"
    "$python" -m pip install --disable-pip-version-check --quiet "setuptools>=77" -e ".[test,plots]" >&2
}

install_package() {
    say "pointing the environment at $checkout"
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e . >&2
}

# Left by setuptools in the checkout and not renewed: started there, python would read its old entry points first.
forget_old_metadata() { rm -rf "$checkout"/sglang_pp_spec.egg-info; }

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9

dependencies=$(dependencies_wanted)
package=$(package_wanted)
if ! [ -x "$python" ] || ! holds dependencies.stamp "$dependencies"; then
    "$python" -m pip --version >/dev/null 2>&1 || make_environment
    rm -f "$venv/dependencies.stamp" "$venv/package.stamp"
    install_dependencies
    forget_old_metadata
    echo "$dependencies" >"$venv/dependencies.stamp"
    echo "$package" >"$venv/package.stamp"
elif ! holds package.stamp "$package"; then
    rm -f "$venv/package.stamp"
    install_package
    forget_old_metadata
    echo "$package" >"$venv/package.stamp"
fi
echo "$python"
