# Write .env in the project's root from .env.example, with random passwords.  An existing .env is not changed.
set -eu
cd "$(dirname "$0")"
target=../../.env
if [ -e "$target" ]; then
    echo "make_env.sh: .env exists; delete it first if you want new passwords" >&2
    exit 1
fi
umask 077
while IFS= read -r line; do
    case "$line" in
    *_PASSWORD=) line="$line$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" ;;
    esac
    printf '%s\n' "$line"
done <.env.example >"$target"
