// Printed text wraps, such as a message, unless a line with columns is too long; that table is scrolled. Each block of code has a button that copies it.
document.addEventListener("DOMContentLoaded", () => {
  for (const text of document.querySelectorAll(".highlight-text pre, .cell_output pre")) {
    const room = text.clientWidth / (0.61 * parseFloat(getComputedStyle(text).fontSize));
    const columns = text.textContent.split("\n").filter((line) => /\S {2,}\S/.test(line));
    if (columns.every((line) => line.length < room)) text.style.whiteSpace = "pre-wrap";
  }
  if (!navigator.clipboard) return;
  for (const block of document.querySelectorAll("div.highlight")) {
    if (block.closest(".highlight-text, .cell_output")) continue;
    const button = document.createElement("button");
    button.className = "copy-button";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").innerText.trimEnd() + "\n");
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }
});
