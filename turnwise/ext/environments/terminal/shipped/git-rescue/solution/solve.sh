sh make-repo.sh && cd project && git cherry-pick "$(git reflog --format='%h %gs' | grep 'commit: Notes' | cut -d' ' -f1)" && cd ..
