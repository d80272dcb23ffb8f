// The experts of one answer.

/** What is known of one answer: of each computed token, experts and weights in each layer. */
export class Record {
  constructor(layers) {
    this.layers = layers;
    this.experts = Math.max(...layers.map((layer) => layer.experts));
    this.start = 0;
    this.prompt = 0;
    this.tokens = [];
    this.ids = [];
    this.weights = [];
    this.counts = layers.map(() => new Float64Array(this.experts));
    this.sums = layers.map(() => new Float64Array(this.experts));
  }

  add({ start, prompt_tokens, tokens, ids, weights }) {
    if (!this.tokens.length) this.start = start;
    this.prompt = prompt_tokens;
    for (let i = 0; i < tokens.length; i++) {
      ids[i].forEach((chosen, layer) =>
        chosen.forEach((expert, k) => {
          if (expert < 0) return;
          this.counts[layer][expert]++;
          this.sums[layer][expert] += weights[i][layer][k];
        }),
      );
    }
    this.tokens.push(...tokens);
    this.ids.push(...ids);
    this.weights.push(...weights);
  }

  weight(token, layer, expert) {
    const k = this.ids[token][layer].indexOf(expert);
    return k < 0 ? 0 : this.weights[token][layer][k];
  }
}
