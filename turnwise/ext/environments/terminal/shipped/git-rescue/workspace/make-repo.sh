#!/bin/sh
set -e
export GIT_AUTHOR_NAME=Ada GIT_AUTHOR_EMAIL=ada@example.org GIT_COMMITTER_NAME=Ada GIT_COMMITTER_EMAIL=ada@example.org
git init --quiet --initial-branch=main project
cd project
git config user.name Ada
git config user.email ada@example.org
echo "# project" > README.md
git add README.md
git commit --quiet --message "Begin"
printf 'call the printer\nbuy stamps\nrenew the domain before the 14th\n' > notes.txt
git add notes.txt
git commit --quiet --message "Notes"
git reset --quiet --hard HEAD~1
echo "More is to come." >> README.md
git commit --quiet --all --message "Say more"
