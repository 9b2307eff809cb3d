cat > build.sh <<'SH'
#!/bin/bash
set -e
cd "$(dirname "$0")"
mkdir -p dist
ls parts | sort -n | while IFS= read -r part; do cat "parts/$part"; done > dist/book.txt
cd dist
sha256sum book.txt > book.sha256
SH
chmod +x build.sh
