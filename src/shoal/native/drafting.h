/* A drafter's steps over elements of type T; see kernels.c. */

/* One step: the pass, the draw, and the block of the next step. Returns 0, or why nothing was drawn: below 0 as `decode` and `draw`
   fail, above 0 the rows that have no distribution. */
int64_t NAME(draft)(DraftStep *step) {
    Pass *pass = &step->pass;
    Draws *draws = &step->draws;
    int failed = NAME(decode)(pass);
    if (failed) return -failed;
    int64_t strange = draw(draws), rows = pass->rows;
    if (strange) return strange;
    for (int64_t row = 0; row < rows; row++) {
        if (step->positions) step->positions[row] = step->positions[row * pass->columns + step->bounds[rows + row] - 1] + 1;
        step->bounds[row] += step->bounds[rows + row];
        step->bounds[rows + row] = 1;
    }
    pass->ids = draws->tokens, pass->id_row = 1;
    pass->tokens = rows, pass->columns = 1;
    draws->block.uniforms += draws->block.uniforms_column;
    draws->tokens += rows, draws->chosen += rows;
    if (draws->highest) draws->highest += rows;
    if (draws->logprobs) draws->logprobs += rows;
    if (draws->probs) draws->probs += rows * draws->block.vocab;
    return 0;
}
