"""Fill in the middle that parses: the texts that may stand between the two texts around a cursor.

`requests` adds checks to requests; `checked_languages` has them by name. `python` checks Python:
`viable` calls its parser, `layout` follows lines and brackets, `endings` looks at the text behind
the cursor. `middles` checks any grammar in lark's language (`grammars`, whose terminals
`expressions` makes into `automata`): `behind` reads the text behind the cursor, `quotients` the
text before it and the new text. `tree_middles` checks languages that tree-sitter reads, by the
`error_nodes` of the whole.
"""
