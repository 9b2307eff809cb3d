#!/bin/bash
set -e
mkdir dist
for part in $(ls parts); do
  cat parts/$part >> dist/book.txt
done
sha256sum dist/book.txt > book.sha256
