POSIXLY_CORRECT=1
\unset -f set unset exit return trap eval exec test [ command builtin unalias shopt printf
\unset POSIXLY_CORRECT
\unalias -a
\shopt -u expand_aliases
