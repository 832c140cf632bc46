# Makes the repository: with the same commits each time.
set -e
export GIT_AUTHOR_DATE="2026-01-01T00:00:00Z" GIT_COMMITTER_DATE="2026-01-01T00:00:00Z"
git config --global user.name Someone
git config --global user.email someone@example.com
git init -q -b main .
commit() { git add -A; git commit -q -m "$1"; }
cat > slugs.py <<'PYTHON'
import re


def slug(title):
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
PYTHON
cat > check.py <<'PYTHON'
from slugs import slug

assert slug("Hello,  World!") == "hello-world"
assert slug("  a  b ") == "a-b"
PYTHON
commit "Make slugs of titles"
for name in one two three; do echo "$name" > "$name.txt"; commit "Add $name"; done
cat > slugs.py <<'PYTHON'
import re


def slug(title, limit=0):
    """Return the title as part of an address, with at most `limit` characters; 0: any number."""
    found = re.sub(r"[^a-z0-9]", "-", title.lower()).strip("-")
    return found[:limit].strip("-") if limit else found
PYTHON
commit "Slugs may have a limit"
for name in four five six; do echo "$name" > "$name.txt"; commit "Add $name"; done
git rev-parse HEAD > .git/begins-at
